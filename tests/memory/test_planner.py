import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vivace import words
from vivace.errors import AnswerIsNo
from vivace.memory.planner import KEEP, Choice, Option, decide, pareto, smallest

sizes = st.integers(0, 40)


@st.composite
def options(draw):
    whole = draw(sizes)
    others = [
        Option(
            Choice(name, ""),
            held := draw(st.integers(0, whole)),
            draw(st.integers(held, whole + 5)),
            draw(sizes) / 4,
        )
        for name in ("checkpoint", "compress_activations")[: draw(st.integers(0, 2))]
    ]
    return [Option(KEEP, whole, whole, 0.0), *others]


trees = st.lists(options(), min_size=1, max_size=6)


def judged(chosen):
    """Peak and seconds of one option for each block, by their definition."""
    held = peak = 0
    for option in chosen:
        peak = max(peak, held + option.working_bytes)
        held += option.held_bytes
    return peak, sum(option.seconds for option in chosen)


def by_name(blocks, names):
    return [next(o for o in options if o.name == name) for options, name in zip(blocks, names, strict=True)]


@given(trees, st.integers(0, 150))
@settings(max_examples=200, deadline=None)
def test_the_plan_fits_and_no_other_is_cheaper(blocks, budget):
    every = [judged(chosen) for chosen in itertools.product(*blocks)]
    fitting = [seconds for peak, seconds in every if peak <= budget]
    least = min(peak for peak, _ in every)
    assert smallest(blocks).peak_bytes == least
    if not fitting:
        with pytest.raises(AnswerIsNo, match=rf"smallest possible is {words.size(least)}"):
            decide(blocks, budget)
        return
    found = decide(blocks, budget)
    assert judged(by_name(blocks, found.names)) == (found.peak_bytes, found.seconds)
    assert found.peak_bytes <= budget
    assert found.seconds == min(fitting)


@given(trees)
@settings(max_examples=50, deadline=None)
def test_the_curve_falls_from_the_smallest_to_the_fastest(blocks):
    curve = pareto(blocks)
    assert curve[0].peak_bytes == smallest(blocks).peak_bytes
    assert curve[-1].seconds == 0.0
    for before, after in itertools.pairwise(curve):
        assert before.seconds > after.seconds
        assert before.peak_bytes < after.peak_bytes


def test_many_blocks_are_decided_on_a_grid_to_the_safe_side(monkeypatch):
    monkeypatch.setattr("vivace.memory.planner.STATES", 500)
    blocks = [
        [
            Option(KEEP, 1000 + i * i, 1000 + i * i, 0.0),
            Option(Choice("checkpoint", ""), 0, 1000 + i * i, 1.0 + i / 7),
        ]
        for i in range(30)
    ]
    budget = sum(options[0].held_bytes for options in blocks) // 2
    found = decide(blocks, budget)
    peak, seconds = judged(by_name(blocks, found.names))
    assert peak <= budget
    assert seconds == pytest.approx(found.seconds)
    monkeypatch.setattr("vivace.memory.planner.STATES", 10**6)
    assert seconds <= 1.1 * decide(blocks, budget).seconds
