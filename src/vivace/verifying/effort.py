"""How much a verification runs, and what fits into how many seconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

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

    def seconds(self, step_seconds: float, rehearsed_seconds: float = 0.0) -> float:
        """About how long it takes to judge a plan that rounds; a shadow step costs about twice a plain one.

        `rehearsed_seconds` of one rehearsed step, of which the shadows have none.
        """
        shadows = self.seeds * self.snapshots * self.lockstep + self.course_seeds * self.course
        shadows += self.life_seeds * (LIFE_STEPS + 3 * min(SHADOW_PAIRS, self.pairs) // 2)
        own = 2 * self.plan_seconds(step_seconds) + rehearsed_seconds * self.rehearsal
        return 2 * step_seconds * (shadows + 2 * self.pairs) + own

    def plan_seconds(self, step_seconds: float, rehearsed_seconds: float = 0.0) -> float:
        """About how long a plan's own steps take but for those of the bias: all that an exact plan needs."""
        steps = self.snapshots * self.lockstep + self.course + LIFE_STEPS
        return step_seconds * steps + rehearsed_seconds * self.rehearsal

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


def feeding_seconds(
    pass_seconds: float | None, each: float, stream: float, *, is_stream: bool, passes: Sequence[int]
) -> float:
    """About how long it takes to compare what a plan feeds with the job's own data, which are both read.

    `pass_seconds` of one pass over the data, None where it was not read to its end; `passes`: how many over
    the training data and over what the metric reads, of which each takes no longer. `each` bounds a pass over
    what has an index, `stream` all passes over a stream.
    """
    most = [stream if is_stream else each * num for num in passes if num]
    if pass_seconds is None:
        return sum(most)
    return sum(
        min(bound, 2 * pass_seconds * num) for bound, num in zip(most, filter(None, passes), strict=True)
    )
