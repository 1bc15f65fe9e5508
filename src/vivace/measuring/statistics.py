"""Ratios with intervals, from timings in pairs or of two runs."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import cache
from itertools import combinations_with_replacement
from statistics import fmean, median, stdev

from vivace.ledger import Ratio

FEWEST_BLOCKS = 4  # of each of two runs: with three the ranks cannot reach 95 %
# An interval that is looked at again and again as pairs are added is told so many times as wide: where a look
# ended the timing, and where something else did. By simulation it then holds the truth in 95 %.
EARLY, LAST = 1.6, 1.25
# Two-sided 95 % quantiles of Student's t by the number of pairs, where there are too few for the rank test.
_STUDENT = {3: 4.303, 4: 3.182, 5: 2.776}


def speed_ratio(pairs: Sequence[tuple[float, float]], *, neighbours: bool = False) -> Ratio:
    """How many times faster the candidate is, from (reference seconds, candidate seconds) pairs; at least 3
    of them.

    Estimate: Hodges-Lehmann, the median of all pairwise means of the log ratios. Interval: distribution-free,
        from the Wilcoxon signed-rank distribution (Hollander, Wolfe & Chicken, Nonparametric Statistical
        Methods, 3.3), at 95 %; with 3 to 5 pairs, where ranks cannot reach 95 %, Student's t. Of
        `neighbours`, which share a block of the reference each with the next and so vary together, it is
        stretched by sqrt(1 + 2 rho), rho being the correlation of a ratio with the next one, up to a half.
    """
    assert len(pairs) >= 3, "an interval needs at least three pairs"
    logs = [math.log(reference / candidate) for reference, candidate in pairs]
    if len(logs) in _STUDENT:
        half = _STUDENT[len(logs)] * stdev(logs) / math.sqrt(len(logs))
        middle, low, high = fmean(logs), fmean(logs) - half, fmean(logs) + half
    else:
        averages = sorted((a + b) / 2 for a, b in combinations_with_replacement(logs, 2))
        cut = _signed_rank_cut(len(logs))
        middle, low, high = median(averages), averages[cut], averages[-1 - cut]
    ratio = Ratio(math.exp(middle), math.exp(low), math.exp(high))
    return stretched(ratio, math.sqrt(1.0 + 2.0 * _correlation(logs))) if neighbours else ratio


def stretched(ratio: Ratio, times: float) -> Ratio:
    """The ratio with an interval so many times as wide, on a logarithmic scale."""
    ends = (ratio.estimate * (end / ratio.estimate) ** times for end in (ratio.low, ratio.high))
    return Ratio(ratio.estimate, *ends)


def _correlation(logs: Sequence[float]) -> float:
    """Of each number with the next one, between 0 and a half; its estimate is low by one part in so many."""
    middle = fmean(logs)
    apart = [one - middle for one in logs]
    square = sum(one * one for one in apart)
    found = sum(map(operator.mul, apart, apart[1:])) / square + 1 / len(logs) if square else 0.0
    return min(0.5, max(0.0, found))


@cache
def _signed_rank_cut(count: int) -> int:
    """How many pairwise means to leave out on each side for a two-sided 95 % interval of `count` pairs."""
    ways = [1]
    for rank in range(1, count + 1):
        longer = ways + [0] * rank
        for total, number in enumerate(ways):
            longer[total + rank] += number
        ways = longer
    tail, cut = 0, 0
    while (tail + ways[cut]) / 2**count <= 0.025:
        tail += ways[cut]
        cut += 1
    return max(0, cut - 1)


def speed_ratio_between(before: Sequence[float], after: Sequence[float]) -> Ratio:
    """How many times faster the second of two runs is that did not alternate, from the seconds a step of
    blocks of each; at least 4 of both.

    Estimate: Hodges-Lehmann, the median ratio of all pairs. Interval: distribution-free at 95 %, from the
        rank-sum distribution (Hollander, Wolfe & Chicken, 4.3). It holds what varies within a run, and
        nothing of what changes between two.
    """
    assert min(len(before), len(after)) >= FEWEST_BLOCKS, "an interval needs at least four blocks of each"
    logs = sorted(math.log(first / second) for first in before for second in after)
    cut = _rank_sum_cut(len(before), len(after))
    return Ratio(math.exp(median(logs)), math.exp(logs[cut]), math.exp(logs[-1 - cut]))


@cache
def _rank_sum_cut(first: int, second: int) -> int:
    """How many of the differences to leave out on each side for a two-sided 95 % interval."""
    ways = [1] + [0] * (first * second)  # of each rank sum above the least: a Gaussian binomial coefficient
    for rank in range(1, second + 1):
        for place in range(len(ways) - 1, first + rank - 1, -1):
            ways[place] -= ways[place - first - rank]
        for place in range(rank, len(ways)):
            ways[place] += ways[place - rank]
    tail, cut = 0, 0
    while (tail + ways[cut]) / math.comb(first + second, second) <= 0.025:
        tail += ways[cut]
        cut += 1
    return max(0, cut - 1)
