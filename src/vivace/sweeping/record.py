"""What is known of the trials of a sweep, as data; read from the journal, where it is written first."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from vivace.sweeping.space import Parameters

_STATES = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}
# Two-sided 95 % quantiles of Student's t by the number of values; between them, the wider one.
_STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
_STUDENT |= {11: 2.228, 12: 2.201, 14: 2.160, 16: 2.131, 21: 2.086, 31: 2.042, 61: 2.000, 121: 1.980}
# Names of metrics from 0 to 1.
_SHARE = re.compile(
    r"(?i)(?<![a-z])(acc|accuracy|precision|recall|f1|iou|dice|jaccard|auc|auroc|map)(?![a-z])"
)


@dataclasses.dataclass(frozen=True)
class TrialRecord:
    """One trial. `state`: complete, pruned, failed, or open where the sweep ended first.

    `curve` is the metric after each epoch, of the `of_epochs` that its job asks for, None where it did not
    come so far as to say; `costs` its ``seconds`` a step and ``parameters``; `plan_left`
    says why the plan did not act to the end; `fused` with how many others it shared its steps at most;
    `reason` why it failed.
    """

    number: int
    parameters: Parameters
    state: str
    metric: float | None
    curve: dict[int, float]
    seconds: float
    costs: dict[str, float | None]
    plan_left: str
    fused: int
    sameness: str
    reason: str
    code: str
    kind: str
    of_epochs: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return dataclasses.asdict(self)


def record_of(frozen: FrozenTrial, fixed: Parameters) -> TrialRecord:
    """The record of an Optuna trial."""
    facts = frozen.user_attrs
    seconds = 0.0
    if frozen.datetime_start is not None and frozen.datetime_complete is not None:
        seconds = (frozen.datetime_complete - frozen.datetime_start).total_seconds()
    return TrialRecord(
        number=frozen.number,
        parameters={**fixed, **frozen.params},
        state=_STATES.get(frozen.state, "open"),
        metric=facts.get("metric"),
        curve={int(epoch): value for epoch, value in (facts.get("curve") or {}).items()},
        seconds=facts.get("seconds", seconds),
        costs=facts.get("costs", {}),
        plan_left=facts.get("plan_left", ""),
        fused=facts.get("fused", 1),
        sameness=facts.get("sameness", ""),
        reason=facts.get("reason", ""),
        code=facts.get("code", ""),
        kind=facts.get("kind", ""),
        of_epochs=facts.get("of_epochs"),
    )


@dataclasses.dataclass(frozen=True)
class Spread:
    """A metric over seeds: its values by seed, their mean, and the 95 % interval of the mean (Student's t).

    Fewer than two values, or equal ones as of a metric in coarse steps, have no interval: `low` and `high`
    are None. `cut`: the interval ends where such a metric does, of which `within_share` knows.
    """

    values: dict[int, float]
    mean: float
    low: float | None
    high: float | None
    cut: bool = False

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return dataclasses.asdict(self)


def spread_of(values: dict[int, float]) -> Spread:
    """The spread of metrics by seed; at least one."""
    found = list(values.values())
    middle, half = mean(found), _half(found)
    return Spread(
        values, middle, None if half is None else middle - half, None if half is None else middle + half
    )


def within_share(finalists: Sequence[Finalist], metric_name: str) -> list[Finalist]:
    """The finalists, no interval of which leaves 0 to 1 where the metric's name and values are a share's. The
    mean cannot lie outside, so the interval covers it as often as before.
    """
    every = [value for one in finalists if one.spread for value in one.spread.values.values()]
    if not _SHARE.search(metric_name) or not all(0 <= v <= 1 for v in every):
        return list(finalists)
    return [
        dataclasses.replace(one, spread=_cut(one.spread, 0.0), behind=_cut(one.behind, -1.0))
        for one in finalists
    ]


def _cut(spread: Spread | None, least: float) -> Spread | None:
    if spread is None or spread.low is None or spread.high is None:
        return spread
    low, high = max(spread.low, least), min(spread.high, 1.0)
    return dataclasses.replace(spread, low=low, high=high, cut=(low, high) != (spread.low, spread.high))


def difference_of(one: dict[int, float], other: dict[int, float]) -> Spread | None:
    """How much better `one` is than `other`, paired by seed; None where they share no seed."""
    shared = {seed: one[seed] - other[seed] for seed in one if seed in other}
    return spread_of(shared) if shared else None


def _half(values: Sequence[float]) -> float | None:
    """Half the width of the mean's 95 % interval; None of values that do not tell how far they scatter."""
    if len(values) < 2 or max(values) - min(values) <= 1e-9 * max(map(abs, values)):
        return None
    quantile = _STUDENT[max(count for count in _STUDENT if count <= len(values))]
    return quantile * stdev(values) / math.sqrt(len(values))


@dataclasses.dataclass(frozen=True)
class Finalist:
    """One of the best configurations, trained anew under seeds that the search has not seen.

    `behind` is how much better the first finalist is, paired by seed; None for that one itself.
    """

    number: int
    parameters: Parameters
    metric: float
    spread: Spread | None
    behind: Spread | None = None

    @property
    def rank(self) -> float:
        """The mean over seeds, or without them the metric of the search."""
        return self.spread.mean if self.spread is not None else self.metric

    @property
    def num_seeds(self) -> int:
        """Under how many of the seeds it came to its end."""
        return len(self.spread.values) if self.spread is not None else 0

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return dataclasses.asdict(self)


def ranked(finalists: Sequence[Finalist]) -> list[Finalist]:
    """The best first, each other one with its distance from it. One that failed under a seed stands behind
    those that failed under fewer: what it would have reached there counts as worse than any metric.
    """
    found = sorted(finalists, key=lambda finalist: (-finalist.num_seeds, -finalist.rank))
    first = found[0].spread if found else None
    return found[:1] + [
        dataclasses.replace(
            finalist,
            behind=difference_of(first.values, finalist.spread.values) if first and finalist.spread else None,
        )
        for finalist in found[1:]
    ]


def is_winner(finalists: Sequence[Finalist]) -> bool | None:
    """Is the first better than each other one beyond the interval of their difference? None: not compared."""
    gaps = [finalist.behind for finalist in finalists[1:] if finalist.num_seeds]  # others failed under each
    if not gaps:
        return None
    return all(gap is not None and gap.low is not None and gap.low > 0 for gap in gaps)
