"""Ratios with intervals from paired timings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import combinations_with_replacement
from statistics import mean, median, stdev

from vivace.ledger import Ratio

# Two-sided 95 % quantiles of Student's t by the number of pairs, where there are too few for the rank test.
_STUDENT = {3: 4.303, 4: 3.182, 5: 2.776}


def speed_ratio(pairs: Sequence[tuple[float, float]]) -> Ratio:
    """How many times faster the candidate is, from (reference seconds, candidate seconds) pairs; at least 3
    of them.

    Estimate: Hodges-Lehmann, the median of all pairwise means of the log ratios. Interval: distribution-free,
        from the Wilcoxon signed-rank distribution (Hollander, Wolfe & Chicken, Nonparametric Statistical
        Methods, 3.3), at 95 %; with 3 to 5 pairs, where ranks cannot reach 95 %, Student's t.
    """
    assert len(pairs) >= 3, "an interval needs at least three pairs"
    logs = [math.log(reference / candidate) for reference, candidate in pairs]
    if len(logs) in _STUDENT:
        half = _STUDENT[len(logs)] * stdev(logs) / math.sqrt(len(logs))
        return Ratio(math.exp(mean(logs)), math.exp(mean(logs) - half), math.exp(mean(logs) + half))
    averages = sorted((a + b) / 2 for a, b in combinations_with_replacement(logs, 2))
    cut = _signed_rank_cut(len(logs))
    return Ratio(math.exp(median(averages)), math.exp(averages[cut]), math.exp(averages[-1 - cut]))


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
