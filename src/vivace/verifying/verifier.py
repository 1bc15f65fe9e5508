"""The parent's side of verification: the child process that it asks."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from vivace.events import OnEvent, teller
from vivace.machine import Machine
from vivace.plan import Plan
from vivace.processes.launch import Child, Source
from vivace.technique import Numerics, Stage
from vivace.training.crew import Company, Crew
from vivace.verifying.verdict import Verdict

RULER = "vivace.verifying.ruler:Ruler"
REPEATABLE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # read when CUDA starts; torch asks for it
TIMEOUT_SECONDS = 3600.0


class Verifier:
    """Verifies plans of one job in a child process that keeps the reference's run and its shadows.

    In a `company` of several ranks each has such a child: all run the reference, with whole batches, and the
    plan together, each with its share; rank 0's judges. On a processor with so many `threads`, if they are
    given.
    """

    def __init__(
        self,
        source: Source,
        machine: Machine,
        *,
        log: Path | None = None,
        timeout: float = TIMEOUT_SECONDS,
        environment: dict[str, str] | None = None,
        reference: Plan | None = None,
        on_event: OnEvent | None = None,
        company: Company | None = None,
        threads: int = 0,
    ) -> None:
        arguments = {"machine": machine.to_dict(), "threads": threads}
        settings = REPEATABLE | (environment or {})
        started = partial((company or Company(source)).child, RULER, arguments, meeting=True)
        self._start: Callable[[], Any] = partial(started, log=log, environment=settings)
        self._child: Child | Crew | None = None
        self.prepared = False  # has the job run, without any plan?
        self._timeout = timeout
        self._reference = reference or Plan()
        self._tell = teller(on_event)

    def judge(self, plan: Plan, *, seconds: float | None = None) -> Verdict:
        """Verify one plan, within about `seconds` (as much as the ruler can use where it is None).

        The first plan's seconds decide how much is run for each; the others' how much may be run again.
        """
        begin = time.monotonic()
        self._child = self._child or self._start()
        if not self.prepared:
            reference = self._reference.to_dict()
            prepared = self._child.ask("prepare", self._timeout, seconds=seconds, reference=reference)
            self.prepared = True
            self._tell("prepared", expected(prepared, plan))
        document = self._child.ask("judge", self._timeout, plan=plan.to_dict(), seconds=seconds)
        return Verdict.of(document | {"seconds": time.monotonic() - begin})

    def close(self) -> None:
        """End the child process; another verdict would begin with a new one."""
        if self._child is not None:
            self._child.close()
        self._child, self.prepared = None, False

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def expected(prepared: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """What is told of the time that a plan will take, from what `Ruler.prepare` returned; `compiles`: and as
    much more as its compiler takes, which nobody knows.
    """
    left = prepared["exact_seconds" if plan.promise == Numerics.EXACT else "left_seconds"]
    if any(technique.card.stage == Stage.DATA for technique in plan.techniques):
        left += prepared["feeding_seconds"]
    return {"seconds": prepared["seconds"], "left_seconds": left, "compiles": plan.compiles}
