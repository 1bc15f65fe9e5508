"""How a search ends that has no plan to give: what it may say of the job, and what only of the machine."""

from __future__ import annotations

from collections.abc import Sequence

from vivace.ledger import Code, Outcome, Trial
from vivace.plan import Plan
from vivace.tuning.objective import START_SECONDS
from vivace.words import count, duration, percent, size


def cannot_pay(saved_seconds: float, trial_seconds: float, high: float) -> str:
    """Why a technique is not tried by which so much can be saved at most, its steps being `high` times as
    fast.
    """
    if saved_seconds <= 0:
        return f"at most {high:.2f}x is predicted, and without it the job fits into memory"
    return (
        f"it can save {duration(saved_seconds)} of this training at most, and trying it takes "
        f"{duration(trial_seconds)}"
    )


def ending(
    trials: Sequence[Trial], budget_seconds: float, waiting: Sequence[str] = ()
) -> tuple[Outcome, str]:
    """The outcome of a search in which no plan was faster, and why, in one sentence without its full stop.

    `waiting` are the techniques likely to help for which the time ended before they were timed by themselves.
    """
    timed = [trial for trial in trials if trial.role == "candidate" and trial.techniques]
    measured = [trial for trial in timed if trial.status == "measured"]
    failed = _undecided(timed)
    left_out = sum(trial.code == Code.NOT_TRIED for trial in timed)
    if not measured and failed:
        told = _failures(failed)
        again = "; the same command goes on" if any(t.code == Code.UNSTEADY for t in failed) else ""
        again += f"; {count(left_out, 'technique')} not tried, because the time ended" if left_out else ""
        return Outcome.COULD_NOT_MEASURE, f"{told[0].upper()}{told[1:]}{again}"
    spared = sum(trial.code == Code.CANNOT_PAY for trial in timed)
    if not measured and left_out:
        told = f"The budget of {duration(budget_seconds)} ended before the first technique was timed"
        return Outcome.NOTHING_TRIED, told
    if measured:
        told = f"{count(len(measured), 'trial')} measured, and none was faster beyond noise"
    elif spared:
        told = "Nothing that can act on this job saves what trying it costs"
    else:
        told = "No technique can act on this job"
    told += f"; {_failures(failed)}" if failed else ""
    if waiting:
        more = f" and {len(waiting) - 1} more" if len(waiting) > 1 else ""
        told += f"; the time ended before {waiting[0]}{more}, likely to help, ran alone"
        return Outcome.TIME_ENDED, told
    told += f"; {count(left_out, 'technique')} not tried, because the time ended" if left_out else ""
    if measured and spared:
        told += f"; {count(spared, 'technique')} not tried, which can save less than trying costs"
    return Outcome.NOTHING_HELPS, told


def _undecided(trials: Sequence[Trial]) -> list[Trial]:
    """The last trials of the plans that failed each time they were tried."""
    last = {trial.plan_id: trial for trial in trials}
    return [trial for trial in last.values() if trial.status == "failed"]


def _failures(failed: Sequence[Trial]) -> str:
    """Why trials have no ratio, and how busy others were meanwhile."""
    unsteady = [trial for trial in failed if trial.code == Code.UNSTEADY]
    if not unsteady:
        last = "because" if len(failed) == 1 else "the last because"
        return f"{count(len(failed), 'trial')} failed, {last} {failed[-1].reason}"
    told = f"the machine was too unsteady for {count(len(unsteady), 'trial')}{_beside(unsteady)}"
    others = len(failed) - len(unsteady)
    return told + (f", and {count(others, 'trial')} failed" if others else "")


def _beside(trials: Sequence[Trial]) -> str:
    busy = max(trial.foreign_share for trial in trials)
    return f" (other processes used up to {percent(busy)} of the processor)" if busy else ""


def not_confirmed(trial: Trial, steps: int | None, *, memory: int | None = None) -> tuple[Outcome, str]:
    """Why a plan that won in the search is not the result: its confirmation, in a training of `steps`; or
    that its peak was above `memory` bytes there, where they are given.
    """
    plan = Plan.from_dict(trial.techniques)
    if trial.ratio is None:
        told = f"{plan} was faster, and could not be confirmed: "
        if trial.code == Code.UNSTEADY:
            told += f"the machine was too unsteady{_beside([trial])}; the same command goes on"
            return Outcome.COULD_NOT_MEASURE, told
        told += str(trial.reason)
        return Outcome.NOTHING_HELPS if trial.status == "refused" else Outcome.COULD_NOT_MEASURE, told
    if memory is not None:
        peak = f"a peak of {size(trial.peak_bytes)}, above the {size(memory)} that are allowed"
        return Outcome.NOTHING_HELPS, f"{plan} fitted, and in fresh processes it had {peak}"
    if trial.ratio.low > 1.0:
        return Outcome.NOTHING_HELPS, f"{plan}{does_not_pay(trial, steps)}"
    again = "in fresh processes"
    if trial.ratio.wide and trial.ratio.high > 1.0:
        others = (
            f"; others used {percent(trial.foreign_share)} of the processor" if trial.foreign_share else ""
        )
        between = f"between {trial.ratio.low:.2f}x and {trial.ratio.high:.2f}x as fast"
        told = f"{plan} was faster, and {again} it was {between}, which says neither yes nor no"
        return Outcome.COULD_NOT_MEASURE, f"{told}{others}"
    return Outcome.NOTHING_HELPS, f"{plan} was not faster again {again}"


def does_not_pay(trial: Trial, steps: int | None) -> str:
    """That faster steps do not make up for a trial's warm-up, or for slower evaluations, as the rest of a
    sentence about its plan.
    """
    if trial.evaluations is not None and trial.evaluating > 1.0:
        before, after = map(duration, trial.evaluations)
        return (
            f" has faster steps, and the training would not end sooner: its warm-up takes "
            f"{duration(trial.warmup_seconds)}, and an evaluation {after} instead of {before}"
        )
    if (trial.warmup_seconds or 0.0) <= START_SECONDS:
        return " has faster steps, by no more than it costs to watch them while it trains"
    return (
        f" has faster steps, and its warm-up of {duration(trial.warmup_seconds)} does not pay in the "
        f"{steps or 0:,} steps of this training"
    )
