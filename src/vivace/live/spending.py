"""What a script waits for us, and how much of that is allowed: being looked at must not make it slower."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

SHARE = 0.01  # of the run's time so far
# Beside it, once: at least so many seconds, or what a first search takes: imports, and about so many steps.
START_SECONDS, IMPORT_SECONDS, SEARCH_STEPS = 2.0, 0.5, 40
# What a search takes must have passed so often, or be left of the pass over the data, before one begins.
PATIENCE = 8.0


@dataclasses.dataclass(frozen=True)
class Clock:
    """Seconds by the wall's clock and by the processor's."""

    wall: Callable[[], float] = time.perf_counter
    cpu: Callable[[], float] = time.process_time


class Spending:
    """Counts the seconds that a run has been kept waiting, and says whether more may be spent.

    `waited` is the time of our own work inside the script's; `lost` what steps under candidates took longer
    than the script's own would have. Both together stay within `allowed`, but for what the last thing that
    was begun took longer than expected. `is_free`: a run that is for nothing but the search.
    """

    def __init__(self, clock: Clock, *, is_free: bool = False) -> None:
        self.clock, self.is_free = clock, is_free
        self.began = clock.wall()
        self.waited = self.lost = 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since the run began."""
        return self.clock.wall() - self.began

    def allowed(self, step_seconds: float) -> float:
        """Seconds that may have been spent by now."""
        return max(START_SECONDS, search_seconds(step_seconds)) + SHARE * self.elapsed

    def affords(self, seconds: float, step_seconds: float) -> bool:
        """May so many seconds more be spent?"""
        return self.is_free or self.waited + self.lost + seconds <= self.allowed(step_seconds)

    def begins(self, step_seconds: float, training_seconds: float, seconds_left: float = 0.0) -> bool:
        """Is a search worth its time? It is where training has lasted, or will last, many times as long."""
        enough = PATIENCE * search_seconds(step_seconds)
        return self.is_free or max(training_seconds, seconds_left) >= enough


def search_seconds(step_seconds: float) -> float:
    """What a first search takes, about."""
    return IMPORT_SECONDS + SEARCH_STEPS * step_seconds


def affordable_steps(seconds: float, step_seconds: float) -> int:
    """Steps until so many seconds more may be spent, at least 1."""
    return max(1, math.ceil(seconds / (SHARE * max(step_seconds, 1e-6))))
