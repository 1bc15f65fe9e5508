"""What is told of an interval that is looked at again and again, on a machine that varies and drifts."""

import math
import random
from types import SimpleNamespace

import pytest

from vivace.live.course import Course
from vivace.live.pairs import Timing
from vivace.measuring import paired
from vivace.plan import Plan

PLAN = Plan.from_dict({"channels_last": {}})


class Varying:
    """A machine whose speed drifts, where blocks differ by 3 % and one in 33 takes 1.3 times as long."""

    def __init__(self, seed):
        self.source, self.drift, self.now = random.Random(seed), 0.0, 0.0

    def seconds(self, gain):
        """By the wall's clock and by the processor's, which knows part of what the wall's does."""
        self.now += paired.BLOCK_SECONDS
        self.drift += self.source.gauss(0.0, 0.003)
        own = self.drift + self.source.gauss(0.0, 0.03)
        late = 0.3 * (self.source.random() < 0.03)
        return tuple(math.exp(log) / gain for log in (own + late, 0.7 * own + self.source.gauss(0.0, 0.02)))

    def monotonic(self):
        return self.now

    def timed(self, gain):
        timed = SimpleNamespace(step_seconds=0.1, processes=[], clocks=None)

        def block(steps):
            wall, processor = self.seconds(gain)
            timed.clocks = paired.Clocks(processor, alone=True)
            return wall

        timed.block = block
        return timed


@pytest.fixture
def raced(monkeypatch):
    """``raced(gain, target, num)``: so many comparisons of the search, of 15 seconds at most each; beside
    others where they are `busy`.
    """

    def run(gain, target, num, *, busy=False):
        others = SimpleNamespace(disturb=lambda: busy, largest=0.0)
        monkeypatch.setattr(paired, "ForeignLoad", lambda processes: others)
        found = []
        for seed in range(num):
            varying = Varying(seed)
            monkeypatch.setattr(paired, "time", varying)
            both = varying.timed(1.0), varying.timed(gain)
            found.append(paired.compare(*both, seconds=15.0, target=target))
        return found

    return run


def share(answers):
    answers = list(answers)
    return sum(answers) / len(answers)


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize(("gain", "target"), [(1.0, 1.0), (1.2, 1.2)])
def test_a_search_tells_no_more_than_pairs_can_know(raced, gain, target, busy):
    found = raced(gain, target, 600, busy=busy)
    by_processor = share(bool(one.working) for one in found)
    assert by_processor > 0.99 if busy else by_processor == 0.0
    assert share(one.ratio.low <= gain <= one.ratio.high for one in found) >= 0.94
    assert share(one.ratio.low > gain for one in found) <= 0.04


def test_what_is_clearly_faster_takes_hardly_more_pairs(raced):
    found = raced(1.1, 1.01, 200)
    assert share(len(one.pairs) for one in found) < 9.0  # 7.1 where each look answered like an only one
    assert share(one.ratio.low > 1.0 for one in found) > 0.97


def ran(asking, varying, gain):
    """What a course concludes of segments that such a machine times."""
    segment = next(asking)
    try:
        while True:
            segment = asking.send(Timing(*varying.seconds(gain if segment.plan == PLAN else 1.0)))
    except StopIteration as ended:
        return ended.value


def course_of(device, **known):
    spending, loop = SimpleNamespace(lost=0.0, affords=lambda *_: True), SimpleNamespace(copy_seconds=0.0)
    known = {"plan": Plan(), "device": SimpleNamespace(type=device), "loop": loop, **known}
    return SimpleNamespace(step_seconds=0.01, spending=spending, **known)


def adopted(gain, num, device):
    """The comparisons of so many runs of a script, with a plan that brings `gain`."""
    for seed in range(num):
        yield ran(Course._compare(course_of(device), Plan(), PLAN), Varying(seed), gain)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_run_hardly_adopts_what_brings_nothing(device):
    found = list(adopted(1.0, 1000, device))
    assert share(one.faster for one in found) <= 0.04
    assert share(one.wall.low <= 1.0 <= one.wall.high for one in found) >= 0.94
    faster = list(adopted(1.1, 300, device))
    assert share(one.faster for one in faster) > 0.93
    assert (
        share(len(one.pairs) for one in faster) < 7.0
    )  # 5.3, and by either clock 4.2, where each look counted


def test_what_was_adopted_for_its_pairs_tells_no_more_with_the_next_ones():
    later = []
    for seed, found in enumerate(adopted(1.1, 1000, "cpu")):
        loop = SimpleNamespace(num_steps=1, copy_seconds=0.0)
        course = course_of("cpu", plan=PLAN, reference=Plan(), loop=loop, comparison=found)
        course._record = lambda *_: None
        ran(Course._time_again(course), Varying(seed + 1000), 1.1)
        later.append(course.comparison)
    assert share(one.wall.low > 1.1 for one in later) < 0.02
