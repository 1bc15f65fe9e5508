"""How much a verification runs, and what fits into how many seconds."""

from __future__ import annotations

import dataclasses

LEAST_REHEARSED, MOST_REHEARSED = 32, 128  # steps
LIFE_STEPS = 8  # usually; more where batches have many shapes
SHADOW_PAIRS = 8  # of each shadow
REHEARSAL_SHARE = 0.1  # of the seconds given


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much to run: shadow seeds, snapshots, lockstep steps from each, steps of the whole course with its
    shadows, steps of the rehearsal, shadows of the life and of the bias, and pairs for the bias.
    """

    seeds: int = 8
    snapshots: int = 3
    lockstep: int = 3
    course: int = 24
    course_seeds: int = 4
    rehearsal: int = MOST_REHEARSED
    life_seeds: int = 4
    pairs: int = 32

    def seconds(self, step_seconds: float) -> float:
        """About how long it takes; a shadow step costs about twice a plain one."""
        shadows = self.seeds * self.snapshots * self.lockstep + self.course_seeds * self.course
        shadows += self.life_seeds * (LIFE_STEPS + 3 * min(SHADOW_PAIRS, self.pairs) // 2)
        return 2 * step_seconds * shadows + 2 * self.plan_seconds(step_seconds)

    def plan_seconds(self, step_seconds: float) -> float:
        """About how long a plan's own steps take, which are all where no shadow is needed."""
        return step_seconds * (self.snapshots * self.lockstep + self.course + LIFE_STEPS + 2 * self.pairs)

    @classmethod
    def within(cls, seconds: float | None, step_seconds: float) -> Effort:
        """The largest effort that fits into `seconds`, else the smallest there is."""
        small = [
            cls(8, 2, 2, 8, 3, pairs=16),
            cls(6, 2, 2, 6, 2, life_seeds=3, pairs=8),
            cls(5, 2, 1, 4, 2, life_seeds=2, pairs=0),
        ]
        efforts = [cls(), cls(course=12, course_seeds=3, pairs=24), *small]
        fitting = (e for e in efforts if seconds is None or e.seconds(step_seconds) <= seconds)
        return next(fitting, efforts[-1])

    def rehearsing(self, seconds: float | None, step_seconds: float) -> Effort:
        """The same, with as many rehearsed steps as their share of `seconds` allows."""
        if seconds is None:
            return self
        affordable = int(REHEARSAL_SHARE * seconds / max(step_seconds, 1e-6))
        return dataclasses.replace(self, rehearsal=min(MOST_REHEARSED, max(LEAST_REHEARSED, affordable)))
