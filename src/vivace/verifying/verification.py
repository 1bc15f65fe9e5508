"""`vivace.verify`: the public function."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

from vivace.errors import ChildFailed, InputError
from vivace.events import OnEvent, teller
from vivace.inspection import inspect
from vivace.inspection.gather import require_torch
from vivace.job import Job, require_job
from vivace.pages.notebook import listening
from vivace.plan import Plan
from vivace.processes.launch import Source, enough_memory_to, plan_of
from vivace.technique import UNIT_ROUNDOFF, Numerics
from vivace.training.crew import Company, company_of, lead_or_follow, num_ranks
from vivace.verifying.acting import evidence_of, of_the_job
from vivace.verifying.against import judge_edit
from vivace.verifying.equivalence import judge_by_metric, require_metric
from vivace.verifying.verdict import Verdict
from vivace.verifying.verifier import Verifier
from vivace.words import SECONDS, amount

SEEDS = 8  # of the test of the metric at most, where nobody says otherwise
LEAST_SECONDS = 5.0
NOTHING = "the plan is empty, and training under it is training as it is: there is nothing to verify"
CROWDED = (
    "others compute on this processor: the plan is verified on one thread, since several would mostly wait "
    "for each other"
)
PRECISIONS = ("float32", "tf32", "bfloat16", "float16")


def verify(
    job: Job | str,
    plan: Plan | str | Path | None = None,
    *,
    against: Job | str | None = None,
    precision: str = "float32",
    metric: bool = False,
    seeds: int = SEEDS,
    margin: float | None = None,
    budget: str | float | None = None,
    on_event: OnEvent | None = None,
) -> Verdict:
    """Compare the plan with strict fp32: bit by bit (EXACT), against the envelope of rounding (ROUNDING), or
    by metric. Before that each of its techniques has to prove that it acts.

    With `against` in the plan's place: is this job, an edited training, still the same model as that job? It
    may round as coarsely as `precision` says.

    A plan that promises SEMANTICS, or `metric`, trains reference and plan to the end, seed by seed until it
    is decided, at most `seeds`, and tests their equivalence within `margin` (default: half a percent of what
    training brings). What so many seeds cannot decide is not kept, and not broken either.

    A `budget` (seconds, or a time such as ``2m``) makes do with fewer shadows and steps, and fewer seeds.
    An empty plan is the job as it is: kept, without a step. `on_event` hears a `vivace.Event` once the
    reference has run, and after each pair of trainings.

    Started by torchrun, all ranks together train under the plan, each with its share of every batch, and are
    held against one process with the whole batch; every rank returns the verdict.

    Raises JobError, PlanError or Refused where the job or the plan cannot run, Refused too where a technique
    changes nothing, InputError where the arguments or the two jobs do not fit together, ChildFailed where a
    process crashes.
    """
    require_torch()
    require_job(job)
    source = Source(job)
    with company_of(source) as company:

        def lead() -> dict[str, Any]:
            begin = time.monotonic()
            asked = _checked(source, job, plan, against, precision, metric, seeds, margin, budget)
            with enough_memory_to("take the same steps with and without what is verified"):
                found = _verified(asked, company, listening(on_event))
            return found.to_dict() | {"seconds": time.monotonic() - begin}

        document = lead_or_follow(company, lead)
    return Verdict.of(document)


@dataclasses.dataclass(frozen=True)
class Asked:
    """What `verify` was asked for, checked; `seconds` are the budget."""

    source: Source
    plan: Plan
    against: Job | str | None
    precision: str
    metric: bool
    seeds: int
    margin: float | None
    seconds: float | None


def _checked(
    source: Source,
    job: Job | str,
    plan: Plan | str | Path | None,
    against: Job | str | None,
    precision: str,
    metric: bool,
    seeds: int,
    margin: float | None,
    budget: str | float | None,
) -> Asked:
    if (plan is None) == (against is None):
        raise InputError(
            "verify needs either a plan (--plan) or, for an edited training, the original (--against)"
        )
    _require_precision(precision, plan is not None)
    seconds = None if budget is None else parse_budget(budget)
    loaded = plan_of(plan, job) if plan is not None else Plan()
    _require_seeds(seeds, margin, metric or loaded.promise == Numerics.SEMANTICS)
    if num_ranks() > 1:
        _require_plan_of_ranks(loaded, num_ranks(), against is not None)
    return Asked(source, loaded, against, precision, metric, seeds, margin, seconds)


def _verified(asked: Asked, company: Company, on_event: OnEvent | None) -> Verdict:
    begin = time.monotonic()
    source, plan, seconds = asked.source, asked.plan, asked.seconds
    if asked.against is None and not plan.techniques and not asked.metric:
        source.load()  # raises where there is no such job
        return Verdict(True, "exact", 0.0, 0.0, steps=0, seeds=0, reason=NOTHING)
    machine, tell = inspect(), teller(on_event)
    if machine.passed_over:
        tell("notice", {"text": machine.passed_over})
    original = Source(asked.against) if asked.against is not None else source
    if asked.metric or plan.promise == Numerics.SEMANTICS:
        require_metric(original)
    if asked.against is not None:
        precision = asked.precision
        roundoff = UNIT_ROUNDOFF[precision] if precision != "float32" else 0.0
        verdict = judge_edit(source, original, machine, roundoff=roundoff, seconds=seconds, tell=tell)
    else:
        threads = company.few_threads(machine.device.kind)
        if threads:
            tell("notice", {"text": CROWDED})
        tell("phase", {"name": "asking each technique whether it acts"})
        acting = evidence_of(plan, company, machine, threads=threads, seconds=seconds)
        tell("phase", {"name": "the reference runs in strict fp32"})
        left = None if seconds is None else max(LEAST_SECONDS, seconds - (time.monotonic() - begin))
        with Verifier(source, machine, on_event=on_event, company=company, threads=threads) as verifier:
            verdict = _judged(verifier, plan, left)
        told = [f"{name} acts: {text}" for name, text in acting.items()]
        details = (*told, *verdict.details)
        verdict = dataclasses.replace(verdict, details=details, ranks=company.world_size)
    if asked.metric or verdict.promise == Numerics.SEMANTICS.name.lower():
        left = math.inf if seconds is None else seconds - (time.monotonic() - begin)
        return judge_by_metric(
            company,
            plan,
            verdict,
            original=original,
            seeds=asked.seeds,
            margin=asked.margin,
            seconds=left,
            tell=tell,
        )
    return verdict


def _judged(verifier: Verifier, plan: Plan, seconds: float | None) -> Verdict:
    try:
        return verifier.judge(plan, seconds=seconds)
    except ChildFailed as failed:
        if verifier.prepared:
            raise
        raise of_the_job(failed) from None


def _require_plan_of_ranks(plan: Plan, world_size: int, is_edit: bool) -> None:
    if is_edit:
        raise InputError(
            f"an edited training is held against its original in one process, and {world_size} ranks were "
            "started: start it without torchrun"
        )
    from vivace.training.ranks import require_one_model  # imports torch, which this process does without

    require_one_model(plan, world_size)


def _require_precision(precision: str, is_plan: bool) -> None:
    if precision not in PRECISIONS:
        raise InputError(f"the precision of an edit is one of {', '.join(PRECISIONS)}, not {precision!r}")
    if is_plan and precision != "float32":
        raise InputError(f"precision {precision} counts for an edited training only: a plan declares its own")


def _require_seeds(seeds: int, margin: float | None, by_metric: bool) -> None:
    if seeds < 2:
        raise InputError(f"an equivalence test needs at least 2 seeds, not {seeds}")
    if margin is not None and not 0 < margin < math.inf:
        raise InputError(f"margin is {margin!r}; it must be a difference of the metric above 0")
    if not by_metric and (margin is not None or seeds != SEEDS):
        given = f"margin {margin:g}" if margin is not None else f"{seeds} seeds"
        raise InputError(f"{given} would count for the test of the metric only: ask for metric too")


def parse_budget(budget: str | float) -> float:
    """A number of seconds, or a time such as ``90s``, ``2m`` or ``1h``, in seconds. Raises InputError."""
    seconds = amount(str(budget), {"": 1.0, **SECONDS})
    if seconds is None or seconds < LEAST_SECONDS:
        raise InputError(
            f"the budget is {budget!r}; it must be seconds from {LEAST_SECONDS:.0f} on, or a time such as 2m"
        )
    return seconds
