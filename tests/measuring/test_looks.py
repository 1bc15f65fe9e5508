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
        return SimpleNamespace(
            step_seconds=0.1, processes=[], clocks=None, block=lambda steps: self.seconds(gain)[0]
        )


@pytest.fixture
def raced(monkeypatch):
    """``raced(gain, target, num)``: so many comparisons of the search, of 15 seconds at most each."""
    quiet = SimpleNamespace(disturb=lambda: False, largest=0.0)
    monkeypatch.setattr(paired, "ForeignLoad", lambda processes: quiet)

    def run(gain, target, num):
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


@pytest.mark.parametrize(("gain", "target"), [(1.0, 1.0), (1.2, 1.2)])
def test_a_search_tells_no_more_than_pairs_can_know(raced, gain, target):
    found = raced(gain, target, 600)
    assert share(one.ratio.low <= gain <= one.ratio.high for one in found) >= 0.94
    assert share(one.ratio.low > gain for one in found) <= 0.04


def test_what_is_clearly_faster_takes_hardly_more_pairs(raced):
    found = raced(1.1, 1.01, 200)
    assert share(len(one.pairs) for one in found) < 9.0  # 7.1 where each look answered like an only one
    assert share(one.ratio.low > 1.0 for one in found) > 0.97


def adopted(gain, num, device):
    """The comparisons of so many runs of a script, with a plan that brings `gain`."""
    spending = SimpleNamespace(lost=0.0, affords=lambda *_: True)
    course = SimpleNamespace(
        step_seconds=0.01,
        plan=Plan(),
        spending=spending,
        device=SimpleNamespace(type=device),
        loop=SimpleNamespace(copy_seconds=0.0),
    )
    for seed in range(num):
        varying = Varying(seed)
        asking = Course._compare(course, Plan(), PLAN)
        segment = next(asking)
        try:
            while True:
                segment = asking.send(Timing(*varying.seconds(gain if segment.plan == PLAN else 1.0)))
        except StopIteration as ended:
            yield ended.value


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
