"""The interval of a speed ratio: coverage, symmetry, and the smallest numbers of pairs."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vivace.measuring.paired import Comparison, across
from vivace.measuring.statistics import _signed_rank_cut, speed_ratio

TIMES = st.floats(0.01, 100.0)
PAIRS = st.lists(st.tuples(TIMES, TIMES), min_size=3, max_size=20)


@given(PAIRS)
def test_the_estimate_lies_in_its_interval_and_swapping_inverts_it(pairs):
    ratio = speed_ratio(pairs)
    assert ratio.low <= ratio.estimate * (1 + 1e-9)
    assert ratio.estimate <= ratio.high * (1 + 1e-9)
    swapped = speed_ratio([(b, a) for a, b in pairs])
    assert swapped.estimate == pytest.approx(1 / ratio.estimate, rel=1e-6)
    assert swapped.low == pytest.approx(1 / ratio.high, rel=1e-6)


@given(PAIRS, st.floats(0.1, 10))
def test_a_slower_machine_changes_nothing(pairs, factor):
    ratio, scaled = speed_ratio(pairs), speed_ratio([(a * factor, b * factor) for a, b in pairs])
    assert scaled.estimate == pytest.approx(ratio.estimate, rel=1e-6)
    assert scaled.width == pytest.approx(ratio.width, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("count", [3, 5, 6, 10, 20])
def test_the_interval_covers_the_truth_as_often_as_it_says(count):
    source = random.Random(count)
    held = 0
    for _ in range(600):
        pairs = [(1.7 * source.lognormvariate(0, 0.1), source.lognormvariate(0, 0.1)) for _ in range(count)]
        ratio = speed_ratio(pairs)
        held += ratio.low <= 1.7 <= ratio.high
    assert held / 600 >= 0.92


@pytest.mark.parametrize("count", [6, 12, 30])
@pytest.mark.parametrize("spreads", [(0.1, 0.1), (0.1, 0.01), (0.01, 0.1)])
def test_an_interval_of_pairs_that_share_blocks_covers_the_truth_as_well(count, spreads):
    """Each of the reference's blocks, or each of the candidate's, is off by so much."""
    source, held, naive = random.Random(count), 0, 0
    for _ in range(600):
        before = [1.7 * source.lognormvariate(0, spreads[0]) for _ in range(count + 1)]
        both = [
            ((one + other) / 2, source.lognormvariate(0, spreads[1]))
            for one, other in itertools.pairwise(before)
        ]
        ratio, plain = speed_ratio(both, neighbours=True), speed_ratio(both)
        held += ratio.low <= 1.7 <= ratio.high
        naive += plain.low <= 1.7 <= plain.high
    assert held / 600 >= 0.9
    assert held >= naive
    assert spreads != (0.1, 0.01) or count < 12 or naive / 600 < 0.9


def test_cuts_agree_with_the_published_table():
    # Table of the signed-rank statistic, two-sided 5 %: T = 0, 2, 3, 5, 8 for n = 6 to 10.
    assert [_signed_rank_cut(n) for n in (6, 7, 8, 9, 10)] == [0, 2, 3, 5, 8]


def test_one_wild_pair_does_not_move_the_estimate():
    pairs = [(2.0, 1.0)] * 9 + [(2.0, 30.0)]
    assert speed_ratio(pairs).estimate == pytest.approx(2.0)


@pytest.mark.parametrize("count", [3, 4, 5])
def test_an_interval_across_processes_holds_their_spread(count):
    source = random.Random(count)
    held = narrow = 0
    for _ in range(300):
        rounds = [_round(source, 1.7 * source.lognormvariate(0, 0.04)) for _ in range(count)]
        ratio = across(rounds)
        held += ratio.low <= 1.7 <= ratio.high
        blocks = speed_ratio([pair for comparison in rounds for pair in comparison.pairs])
        narrow += blocks.low <= 1.7 <= blocks.high
    assert held / 300 >= 0.92
    assert narrow < held  # what the blocks alone say is too sure


def test_fewer_than_three_processes_give_the_hull():
    source = random.Random(0)
    slow, fast = _round(source, 1.1), _round(source, 1.5)
    assert across([slow]).low == pytest.approx(slow.ratio.low)
    both = across([slow, fast])
    assert (both.low, both.high) == (slow.ratio.low, fast.ratio.high)


def _round(source, truth):
    pairs = tuple((truth * source.lognormvariate(0, 0.01), 1.0) for _ in range(8))
    return Comparison(speed_ratio(pairs), pairs)
