"""How long a verification is said to take, and what fits into how many seconds."""

import dataclasses

import pytest

from vivace.plan import Plan
from vivace.verifying.effort import Effort, feeding_seconds
from vivace.verifying.verifier import expected

PREPARED = {"seconds": 5.0, "left_seconds": 100.0, "exact_seconds": 10.0, "feeding_seconds": 60.0}


def test_an_exact_plan_takes_its_own_steps_and_the_rehearsed_ones():
    full = Effort()
    assert full.plan_seconds(0.1) == pytest.approx(0.1 * (3 * 3 + 24 + 8))
    assert full.plan_seconds(0.1, 0.01) == pytest.approx(4.1 + 128 * 0.01)


def test_pairs_for_the_bias_are_steps_of_a_plan_that_rounds_alone():
    full, none = Effort(), dataclasses.replace(Effort(), pairs=0)
    assert full.plan_seconds(1.0) == none.plan_seconds(1.0)
    assert full.seconds(1.0) - none.seconds(1.0) == 2 * (2 * 32 + 4 * 12)


def test_full_effort_takes_some_700_steps():
    assert Effort().seconds(1.0) == 706
    assert Effort().seconds(1.0, 0.5) == 706 + 64


def test_an_effort_fits_into_its_seconds():
    assert Effort.within(None, 10.0) == Effort()
    assert Effort.within(706, 1.0) == Effort()
    for seconds in (705, 400, 200, 100):
        found = Effort.within(seconds, 1.0)
        assert found != Effort()
        assert found.seconds(1.0) <= seconds
    assert Effort.within(0.0, 1.0).seeds == 5


@pytest.mark.parametrize(
    ("pass_seconds", "is_stream", "passes", "expected"),
    [
        (0.5, False, (3, 2), 5.0),  # each is read twice
        (7.0, False, (3, 0), 30.0),  # ten seconds of each
        (None, False, (3, 2), 50.0),
        (None, True, (3, 0), 60.0),
        (20.0, True, (3, 2), 120.0),
        (4.0, True, (3, 2), 40.0),
    ],
)
def test_comparing_what_is_fed_takes_as_long_as_reading_it_and_no_longer_than_allowed(
    pass_seconds, is_stream, passes, expected
):
    assert feeding_seconds(pass_seconds, 10.0, 60.0, is_stream=is_stream, passes=passes) == expected


@pytest.mark.parametrize(
    ("plan", "left", "compiles"),
    [
        ({"bf16_autocast": {}}, 100.0, False),
        ({"bf16_autocast": {}, "compile": {}}, 100.0, True),
        ({"host_allocator": {}}, 10.0, False),
        ({"loader_workers": {"num_workers": 2}}, 70.0, False),
    ],
    ids=str,
)
def test_the_time_told_is_that_of_the_plan(plan, left, compiles):
    assert expected(PREPARED, Plan.from_dict(plan)) == {
        "seconds": 5.0,
        "left_seconds": left,
        "compiles": compiles,
    }
