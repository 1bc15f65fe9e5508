"""Charts as SVG: places inside their axes, labels that cover no other, nothing that is read as markup."""

import itertools
import math
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vivace.pages import charts


def test_twice_and_half_are_equally_far_from_one():
    scale = charts.ratios([0.5, 2.0])
    assert scale.at(2.0) - scale.at(1.0) == pytest.approx(scale.at(1.0) - scale.at(0.5), abs=0.02)
    assert 1.0 in scale.ticks


@pytest.mark.parametrize(("low", "high"), [(0, 1), (3, 3), (-0.02, 0.07), (0, 123456)])
def test_axes_hold_their_ticks(low, high):
    scale = charts.linear(low, high)
    assert 2 <= len(scale.ticks) <= 8
    assert all(scale.low <= tick <= scale.high for tick in scale.ticks)


def test_a_short_logarithmic_axis_has_labels_too():
    assert charts.decades(2410, 7000).ticks == (3000, 4000, 5000, 6000, 7000)
    assert charts.decades(0.01, 30).ticks == (0.01, 0.1, 1, 10)


def test_labels_cover_no_other_and_stay_inside():
    across, up = charts.linear(0.0, 1.0), charts.linear(0.0, 1.0)
    places = [(0.5, 0.5), (0.49, 0.5), (0.52, 0.5), (0.98, 0.9), (0.01, 0.1)]
    dots = [charts.Dot(x, y, x, x, f"card {i}", "") for i, (x, y) in enumerate(places)]
    plot = charts.scatter("offers", dots, across, up, "", (str, str))
    labels = re.findall(r'<text[^>]*x="([^%]*)%"[^>]*?(text-anchor="end")?>(card \d)</text>', plot)
    shown = {name: bool(left) for _, left, name in labels}
    assert shown == {"card 0": False, "card 1": True, "card 3": True, "card 4": False}


def test_texts_are_escaped_and_missing_values_interrupt_a_line():
    plot = charts.lines("<b>", [1, 2, 3, 4, 5], {"plan": [1.0, 2.0, float("nan"), 4.0, 5.0]})
    assert "<b>" not in plot
    (path,) = re.findall(r'class="line plan" d="([^"]*)"', plot)
    assert path.count("M") == 2
    assert charts.lines("", [1, 2], {"plan": [None, None]}) is None


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0), st.floats()), min_size=1), st.floats(-1e9, 1e9))
@example([(1.0, -1.79e308), (2.0, 1.79e308)], 0.5)
def test_the_course_of_a_metric_is_drawn_whatever_its_numbers_are(line, sane):
    plot = charts.courses("metric", {"plan": [*line, (1.0, sane)], "reference": line})
    numbers = re.findall(r'class="line \w+" d="([^"]*)"', plot)
    assert all(0 <= int(at) <= charts.BOX for path in numbers for at in re.findall(r"-?\d+", path))
    assert charts.courses("metric", {"plan": [(1.0, math.nan)]}) is None


def test_memory_is_drawn_in_steps_above_what_is_held():
    plot = charts.area("memory", [0.0, 5.0, 10.0], [3.0, 4.0, 3.0], 2.0, (5.0, 4.0, "4 MiB"))
    held, live = (
        re.findall(r"(\d+) (\d+)", re.search(f'class="{kind}" d="([^"]*)"', plot)[1])
        for kind in ("held", "live")
    )
    assert {x for x, _ in held} == {"0", "1000"}
    corners = [tuple(map(int, point)) for point in live]
    assert corners[0][1] == corners[-1][1] == int(held[1][1])
    assert all(a[0] == b[0] or a[1] == b[1] for a, b in itertools.pairwise(corners))


def test_labels_of_a_small_axis_are_no_zeros():
    ticks = charts.linear(0.0, 1e-14).ticks
    assert len(set(ticks)) == len(ticks) == 6
    assert ticks[1] == 2e-15


@pytest.mark.parametrize("values", [[2**60, 2**60 + 1], [0.0, 0.0], [3, 3, 3], [-(2**60)] * 2])
def test_an_axis_of_equal_numbers_has_a_place_for_them(values):
    assert set(charts.axis_of("seed", values, str).places) == {0.0}


def test_no_two_levels_read_the_same():
    """As where an accuracy lies near 1, and words have three digits."""
    up = charts.linear(0.987, 1.007)
    drawn = str(charts.frame("t", charts.linear(0, 1), up, [], "", (str, lambda value: f"{value:.2f}")))
    (levels,) = re.findall(r'<div class="up">(.*?)</div>', drawn)
    told = re.findall(r">([^<]+)</span>", levels)
    assert told == ["0.99", "0.995", "1", "1.005"]
