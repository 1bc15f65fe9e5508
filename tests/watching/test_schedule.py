"""Which steps are watched: what happens every so many steps is met, at a cost that was agreed."""

import itertools

import pytest

from vivace.watching.schedule import Schedule


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def followed(num_steps, *, epoch=500, known=True, step_seconds=0.01, cost=0.03, share=0.01, shape=None):
    """The steps that are watched of a run, why, and the share of the time that it took."""
    clock = Clock()
    schedule = Schedule(share, num_steps if known else None, clock)
    found = {}
    for index in range(num_steps):
        why = schedule.due(index + 1, index % epoch, shape(index) if shape else ())
        clock.now += step_seconds
        if why:
            found[index + 1] = why
            clock.now += cost
            schedule.watched(cost, why)
    return found, schedule.spent / clock.now


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("num_steps", [2_000, 50_000])
def test_the_cost_stays_within_what_was_agreed(num_steps, known):
    found, share = followed(num_steps, known=known)
    assert share <= 0.0101
    assert share >= 0.006
    assert found[1] == "the first"


def test_the_first_step_is_watched_whatever_it_costs():
    found, share = followed(20, cost=10.0)
    assert found == {1: "the first"}
    assert share > 0.9


@pytest.mark.parametrize("period", [7, 50, 100, 200, 500, 1000])
@pytest.mark.parametrize("phase", [0, 1])
def test_what_happens_every_so_many_steps_is_met(period, phase):
    found, _ = followed(30_000)
    assert any(step % period == phase for step in found)


def test_epochs_and_shapes_have_their_turn():
    found, _ = followed(20_000, shape=lambda index: index % 500 == 499)
    reasons = set(found.values())
    assert reasons >= {"the first", "an epoch begins", "regular"}
    assert reasons & {"an epoch ends", "a new shape"}


def test_all_can_be_watched_if_money_is_no_object():
    found, _ = followed(300, share=1e6)
    assert len(found) >= 297


def test_steps_are_spread_over_the_whole_run():
    found, _ = followed(50_000)
    gaps = [b - a for a, b in itertools.pairwise([*sorted(found), 50_000])]
    assert max(gaps) <= 5_000


def test_again_means_the_next_step():
    schedule = Schedule(0.01, 1000, Clock())
    assert schedule.due(1, 0, ()) == "the first"
    schedule.watched(5.0, "the first")
    assert not schedule.due(2, 1, ())
    schedule.again()
    assert schedule.due(3, 2, ())


def test_what_the_first_step_took_is_known_apart():
    clock = Clock()
    schedule = Schedule(0.01, 100, clock)
    for index in range(10):
        why = schedule.due(index + 1, index, ())
        clock.now += 1.0
        if why:
            clock.now += 10.0 if not index else 2.0
            schedule.watched(10.0 if not index else 2.0, why)
        if index < 2:
            schedule.again()
    assert schedule.spent == 14.0
    assert schedule.first_part == pytest.approx(10.0 / 14.0)


def test_looks_between_steps_stay_within_what_was_agreed():
    clock = Clock()
    schedule = Schedule(0.01, 20_000, clock)
    looks = 0
    for index in range(20_000):
        why = schedule.due(index + 1, index % 20, ())
        clock.now += 0.01
        if why:
            clock.now += 0.03
            schedule.watched(0.03, why)
        if index % 20 == 19 and schedule.can_rest():
            clock.now += 0.004
            schedule.rested(0.002)
            schedule.rested(0.002)
            looks += 1
    assert schedule.spent <= 0.0101 * clock.now
    assert looks >= 100
