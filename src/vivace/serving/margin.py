"""What a form loses of the metric, on the same samples, with an interval; and whether it is too much."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from statistics import mean, stdev
from typing import Any

from vivace.errors import InputError

Z = 1.959964  # of the normal distribution: two-sided 95 %
FEW = 10  # samples that differ; with fewer, the normal distribution says too much
MOST_NEEDED = 100_000_000


@dataclasses.dataclass(frozen=True)
class Change:
    """The metric of a form minus that of the reference on the same samples, with its 95 % interval.

    `needed` are about so many samples that would decide; None where they decide already, or none would.
    """

    reference: float
    value: float
    low: float
    high: float
    margin: float
    samples: int
    needed: int | None = None
    method: str = ""

    @property
    def difference(self) -> float:
        """What the form gains; below 0 it loses."""
        return self.value - self.reference

    @property
    def kept(self) -> bool | None:
        """Does it lose less than the margin? None where the samples are too few to tell."""
        if self.low >= -self.margin:
            return True
        return False if self.high < -self.margin else None

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return {**dataclasses.asdict(self), "difference": self.difference, "kept": self.kept}


def by_sample(
    ours: Sequence[float], theirs: Sequence[float], margin: float, reference: float, value: float
) -> Change:
    """Of a metric that is the mean over samples: `ours` of the form and `theirs` of the reference.

    Where a sample is right or wrong, Tango's score interval for paired proportions (Statistics in Medicine
    17, 1998), which holds for few and for no differing samples too; else Student's t, widened where few
    differ.
    """
    count = len(ours)
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    levels = sorted({*ours, *theirs})
    if len(levels) <= 2:
        span = levels[-1] - levels[0] if len(levels) == 2 else abs(levels[0]) or 1.0
        gained = sum(d > 0 for d in differences)
        lost = sum(d < 0 for d in differences)

        def bounds(samples: float) -> tuple[float, float]:
            share = samples / count
            low, high = tango(gained * share, lost * share, samples)
            return span * low, span * high

        return _change(bounds, count, margin, reference, value, "Tango's interval, sample by sample")
    span = levels[-1] - levels[0]
    center, spread = mean(differences), stdev(differences) if count > 1 else 0.0
    few = sum(d != 0 for d in differences) < FEW

    def wide(samples: float) -> tuple[float, float]:
        half = student(max(1, count - 1)) * spread / math.sqrt(samples)
        half += span * Z**2 / (samples + Z**2) if few else 0.0
        return center - half, center + half

    return _change(wide, count, margin, reference, value, "Student's t, sample by sample")


def by_groups(
    ours: Sequence[float],
    theirs: Sequence[float],
    margin: float,
    reference: float,
    value: float,
    samples: int,
) -> Change:
    """Of any other metric, by the jackknife: `ours` and `theirs` are the metric without one group of samples
    each.

    The groups are of about equal size (Efron & Tibshirani 1993, chapter 11). Where no group makes a
    difference, or one alone, another sample may still count for its share of the metric.
    """
    groups = len(ours)
    whole = value - reference
    pseudo = [groups * whole - (groups - 1) * (a - b) for a, b in zip(ours, theirs, strict=True)]
    spread, few = stdev(pseudo), any(a == b for a, b in zip(ours, theirs, strict=True))

    def bounds(count: float) -> tuple[float, float]:
        half = student(groups - 1) * spread / math.sqrt(groups * count / samples)
        half += abs(reference) * Z**2 / (count + Z**2) if few else 0.0
        return whole - half, whole + half

    return _change(bounds, samples, margin, reference, value, f"jackknife over {groups} groups of samples")


def _change(
    bounds: Callable[[float], tuple[float, float]],
    count: int,
    margin: float,
    reference: float,
    value: float,
    method: str,
) -> Change:
    low, high = bounds(count)
    found = Change(reference, value, low, high, margin, count, method=method)
    if found.kept is not None or value - reference <= -margin:
        return found
    needed = float(count)
    while needed < MOST_NEEDED and bounds(needed)[0] < -margin:
        needed *= 1.05
    return dataclasses.replace(found, needed=_rounded(needed) if needed < MOST_NEEDED else None)


def _rounded(number: float) -> int:
    """Up to two digits: nobody knows it better."""
    power = 10 ** max(0, math.floor(math.log10(number)) - 1)
    return int(math.ceil(number / power) * power)


def tango(gained: float, lost: float, count: float) -> tuple[float, float]:
    """The 95 % score interval of the difference of two proportions that are paired.

    `gained` samples of `count` are right in the form alone, `lost` in the reference alone.
    """

    def score(difference: float) -> float:
        a = 2 * count
        b = -gained - lost + (2 * count - gained + lost) * difference
        c = -lost * difference * (1 - difference)
        share = (math.sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a)
        variance = count * (2 * share + difference * (1 - difference))
        above = gained - lost - count * difference
        if variance <= 0:
            return math.copysign(math.inf, above) if above else 0.0
        return above / math.sqrt(variance)

    center = (gained - lost) / count
    return _root(score, Z, -1.0, center), _root(score, -Z, center, 1.0)


def _root(function: Callable[[float], float], level: float, low: float, high: float) -> float:
    """Where a falling function passes a level, by bisection."""
    for _ in range(60):
        middle = (low + high) / 2
        if function(middle) > level:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def student(freedom: int) -> float:
    """The two-sided 95 % quantile of Student's t, from 3 degrees of freedom on to 1 %: by the expansion of
    Cornish and Fisher (Abramowitz & Stegun 26.7.5).
    """
    first, second = (Z**3 + Z) / 4, (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96
    third = (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384
    return Z + first / freedom + second / freedom**2 + third / freedom**3


def parse_margin(margin: str | float, reference: float) -> float:
    """``0.5%`` of the reference's metric, or a number in the metric's own unit.

    Raises InputError where it is neither, all of the metric or more, or a share of a metric of 0.
    """
    text = str(margin).strip()
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise InputError(
            f"the margin is {margin!r}; it must be a share of the metric such as 0.5%, or a difference such "
            "as 0.005"
        )
    if text.endswith("%") and value >= 100:
        raise InputError(f"the margin is {margin!r}; a share of the metric must be below 100%, such as 0.5%")
    if text.endswith("%") and not reference:
        raise InputError(
            f"the metric is 0, of which {text} is nothing: give the margin as a difference, such as 0.005"
        )
    return value / 100 * abs(reference) if text.endswith("%") else value
