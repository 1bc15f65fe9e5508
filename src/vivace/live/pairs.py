"""Timed segments of the script's own steps, in pairs: by the wall's clock and by the processor's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from vivace.ledger import Ratio
from vivace.measuring.statistics import speed_ratio, stretched
from vivace.plan import Plan

LOOKS = (4, 6, 8, 12)  # pairs after which it is looked whether the answer is clear
SMALL = 1.03  # a gain that is not worth more pairs
MUCH_SLOWER = 0.5  # times as fast, by both clocks: two pairs are enough


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds a step."""

    wall: float
    cpu: float


@dataclasses.dataclass(frozen=True)
class Segment:
    """So many steps under a plan, of which the first `settling` do not count."""

    plan: Plan
    steps: int
    settling: int = 1


@dataclasses.dataclass(frozen=True)
class Pause:
    """So many steps under a plan, of whatever kind, that are not timed."""

    plan: Plan
    steps: int


@dataclasses.dataclass(frozen=True)
class Pair:
    """Neighbouring segments: under the reference, which is the mean of the two around, and under the plan."""

    reference: Timing
    plan: Timing

    @property
    def is_hopeless(self) -> bool:
        """Is the plan so slow that nobody needs to see it again?"""
        wall, cpu = self.reference.wall / self.plan.wall, self.reference.cpu / max(self.plan.cpu, 1e-9)
        return wall < MUCH_SLOWER and cpu < MUCH_SLOWER


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How many times faster the plan's steps were, by either clock."""

    wall: Ratio
    cpu: Ratio
    pairs: tuple[Pair, ...]
    by_processor: bool = False  # does the processor's clock count where the wall's does not answer?
    beside: tuple[str, ...] = ()  # techniques of the plan that it was timed beside; none: the script as it is

    @property
    def faster(self) -> bool:
        """Is the plan faster beyond noise? On a processor that others use too, its own clock may say it."""
        return self.wall.low > 1.0 or (self.by_processor and self.cpu.low > 1.0 and self.wall.estimate > 1.0)

    @property
    def slower(self) -> bool:
        """Is it slower beyond noise? The processor's clock says it as it says the opposite."""
        return self.wall.high < 1.0 or (
            self.by_processor and self.cpu.high < 1.0 and self.wall.estimate < 1.0
        )

    @property
    def gains_nothing(self) -> bool:
        """Is it no faster by any clock that counts?"""
        return self.wall.estimate <= 1.0 and not (self.by_processor and self.cpu.estimate > 1.0)

    @property
    def is_futile(self) -> bool:
        """Would more pairs hardly show a gain that matters?"""
        return self.wall.high < SMALL or (len(self.pairs) > LOOKS[0] and self.wall.estimate < 1.0)

    @property
    def clock(self) -> Literal["wall", "processor"]:
        """The clock that answers."""
        return "processor" if self.faster and self.wall.low <= 1.0 else "wall"

    @property
    def ratio(self) -> Ratio:
        """The ratio by the clock that answers."""
        return self.cpu if self.clock == "processor" else self.wall

    @property
    def shown(self) -> str:
        """The ratio of the wall's clock, in a sentence."""
        return f"{self.wall.estimate:.2f}x, {self.wall.low:.2f}-{self.wall.high:.2f}"

    def to_dict(self) -> dict[str, Any]:
        """Both ratios, the clock that answers, what they are beside, and of each pair that and the plan by
        the wall's clock and by the processor's.
        """
        found = {"wall": self.wall, "cpu": self.cpu}
        told = {k: {"estimate": r.estimate, "low": r.low, "high": r.high} for k, r in found.items()}
        pairs = [[p.reference.wall, p.plan.wall, p.reference.cpu, p.plan.cpu] for p in self.pairs]
        return {**told, "clock": self.clock, "pairs": pairs, "beside": list(self.beside)}


def middle(before: Timing, after: Timing) -> Timing:
    """The mean of two timings."""
    return Timing((before.wall + after.wall) / 2, (before.cpu + after.cpu) / 2)


def compared(pairs: Sequence[Pair], *, by_processor: bool, wider: float = 1.0) -> Comparison:
    """The ratios of at least three pairs, of which each shares a segment of the reference with the next; with
    intervals so many times `wider`.
    """
    wall = speed_ratio([(p.reference.wall, p.plan.wall) for p in pairs], neighbours=True)
    least = 1e-9  # a processor's clock may stand still in a segment
    cpu = speed_ratio([(max(p.reference.cpu, least), max(p.plan.cpu, least)) for p in pairs], neighbours=True)
    return Comparison(stretched(wall, wider), stretched(cpu, wider), tuple(pairs), by_processor)


def length(step_seconds: float, seconds: float) -> int:
    """Steps of a segment that takes about so many seconds; at least 2, or 1 where steps are long."""
    if step_seconds > 2.0:
        return 1
    return max(2, min(20, round(seconds / max(step_seconds, 1e-6))))
