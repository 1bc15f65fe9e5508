"""The parent's side of verification: the public function, and the child process that it asks."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from vivace.errors import InputError
from vivace.events import OnEvent, teller
from vivace.inspection import inspect
from vivace.inspection.gather import require_torch
from vivace.job import Job
from vivace.machine import Machine
from vivace.plan import Plan
from vivace.processes.launch import Child, Source, plan_of
from vivace.technique import Numerics
from vivace.verifying.equivalence import judge_by_metric
from vivace.verifying.verdict import Verdict

RULER = "vivace.verifying.ruler:Ruler"
SEEDS = 5  # of the test of the metric, where nobody says otherwise


class Verifier:
    """Verifies plans of one job in a child process that keeps the reference's run and its shadows."""

    def __init__(
        self,
        source: Source,
        machine: Machine,
        *,
        log: Path | None = None,
        timeout: float = 3600,
        environment: dict[str, str] | None = None,
        reference: Plan | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        arguments = {"machine": machine.to_dict()}
        repeatable = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # read when CUDA starts; torch asks for it
        settings = repeatable | (environment or {})
        self._start = partial(Child, RULER, source, arguments, log=log, environment=settings)
        self._child: Child | None = None
        self._prepared = False
        self._timeout = timeout
        self._reference = reference or Plan()
        self._tell = teller(on_event)

    def judge(self, plan: Plan, *, seconds: float | None = None) -> Verdict:
        """Verify one plan, within about `seconds` (as much as the ruler can use where it is None).

        The first plan's seconds decide how much is run for each; the others' how much may be run again.
        """
        begin = time.monotonic()
        self._child = self._child or self._start()
        if not self._prepared:
            reference = self._reference.to_dict()
            prepared = self._child.ask("prepare", self._timeout, seconds=seconds, reference=reference)
            self._prepared = True
            self._tell("prepared", prepared)
        document = self._child.ask("judge", self._timeout, plan=plan.to_dict(), seconds=seconds)
        document["checks"] = tuple(document["checks"])
        return Verdict(**document, seconds=time.monotonic() - begin)

    def close(self) -> None:
        """End the child process; another verdict would begin with a new one."""
        if self._child is not None:
            self._child.close()
        self._child, self._prepared = None, False

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def verify(
    job: Job | str,
    plan: Plan | str | Path,
    *,
    metric: bool = False,
    seeds: int = SEEDS,
    margin: float | None = None,
    on_event: OnEvent | None = None,
) -> Verdict:
    """Compare the plan with strict fp32: bit by bit (EXACT), against the envelope of rounding (ROUNDING), or
    by metric.

    A plan that promises SEMANTICS, or `metric`, trains reference and plan to the end with `seeds` seeds each
    and tests their equivalence within `margin` (default: half a percent of the reference's metric).
    `on_event` hears a `vivace.Event` once the reference has run.

    Raises JobError, PlanError or Refused where the job or the plan cannot run, ChildFailed where it crashes.
    """
    require_torch()
    loaded = plan_of(plan, job)
    if seeds < 2:
        raise InputError(f"an equivalence test needs at least 2 seeds, not {seeds}")
    by_metric = metric or loaded.promise == Numerics.SEMANTICS
    if not by_metric and (margin is not None or seeds != SEEDS):
        given = f"margin {margin:g}" if margin is not None else f"{seeds} seeds"
        raise InputError(f"{given} would count for the test of the metric only: ask for metric too")
    source, machine = Source(job), inspect()
    with Verifier(source, machine, on_event=on_event) as verifier:
        verdict = verifier.judge(loaded)
    if metric or verdict.promise == Numerics.SEMANTICS.name.lower():
        return judge_by_metric(source, loaded, verdict, seeds=seeds, margin=margin)
    return verdict
