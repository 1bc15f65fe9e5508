"""What a script waits for us, and how much of that is allowed: being looked at must not make it slower."""

from __future__ import annotations

import dataclasses
import math
import resource
import time
from collections.abc import Callable

SHARE = 0.01  # of the run's time so far
# Beside it, once: at least so many seconds, or what a first search takes: imports, and about so many steps.
START_SECONDS, IMPORT_SECONDS, SEARCH_STEPS = 1.0, 0.3, 40
BEGIN_STEPS = 5  # of them what comes before anything is judged
LEAST_SECONDS = 0.5  # what a search costs at least: imports, files, a few turns and a page
PATIENCE = 16.0  # times as long the run must last
TRUSTED = 4.0  # times what has passed: so much counts of what is said to come
HOPED_SHARE = 0.25  # of the seconds that copies of a step promise
PAYS = 2.0  # times what it costs to try a plan, it must promise
COMPILING_SHARE = 0.02  # of the whole run, once: what compiling brings is not seen before
LATE = 2.0  # times what compiling was said to take: longer it may be only while the run has that to spend
SEARCHING_SHARE = 0.3  # the same, of what is left to a run that is for nothing but the search
CLOSE = 0.05  # so much faster than its copy a step may be


@dataclasses.dataclass(frozen=True)
class Clock:
    """Seconds by the wall's clock and by the processor's."""

    wall: Callable[[], float] = time.perf_counter
    cpu: Callable[[], float] = time.process_time


class Spending:
    """Counts the seconds that a run has been kept waiting, and says whether more may be spent.

    `waited` is the time of our own work inside the script's, and since `working_since` more of it; `lost`
    what steps under candidates took longer than the script's own would have. Both together stay within
    `allowed`, but for the step on copies that was begun last. `hoped` are the seconds that the plan promises
    which is tried;
    `compiling` are those of `waited` that are allowed beside the rest. `free_seconds`: of a run that is for
    nothing but the search.

    `coming` tells the seconds that the run is said to go on; `waited` begins with what the start has taken.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        free_seconds: float | None = None,
        coming: Callable[[], float] = lambda: 0.0,
        waited: float = 0.0,
    ) -> None:
        self.clock, self.coming = clock, coming
        self.is_free, self.free_seconds = free_seconds is not None, free_seconds or 0.0
        self.began = clock.wall()
        self.waited = waited
        self.lost = self.hoped = self.around_calls = self.compiling = 0.0
        self.working_since: float | None = None

    @property
    def own_seconds(self) -> float:
        """All of our own work: also what a step is only looked at around the model's call, about as long as
        after its update.
        """
        return self.waited + self.around_calls

    @property
    def spent(self) -> float:
        """Seconds that the run has been kept waiting until this moment."""
        since = self.working_since
        return self.waited + self.lost + (0.0 if since is None else self.clock.wall() - since)

    @property
    def elapsed(self) -> float:
        """Seconds since the run began."""
        return self.clock.wall() - self.began

    def allowed(self, step_seconds: float) -> float:
        """Seconds that may have been spent by now."""
        return self._allowed(step_seconds, self._counted())

    def _allowed(self, step_seconds: float, counted: float) -> float:
        most = counted / PATIENCE
        once = min(_start(step_seconds), most) + min(HOPED_SHARE * self.hoped, most)
        return once + SHARE * self.elapsed + self.compiling

    def affords(self, seconds: float, step_seconds: float) -> bool:
        """May so many seconds more be spent?"""
        if self.is_free:
            return self.elapsed < self.free_seconds
        return self.lacks(seconds, step_seconds) <= 0.0

    def lacks(self, seconds: float, step_seconds: float) -> float:
        """How many seconds less than `seconds` may be spent now."""
        return self.spent + seconds - self.allowed(step_seconds)

    def will_afford(self, seconds: float, step_seconds: float) -> bool:
        """May so many seconds more be spent now, or when more of the run has passed?"""
        most = self._allowed(step_seconds, self.elapsed + self.coming())
        return self.is_free or self.spent + seconds <= most

    def until(self, step_seconds: float) -> float:
        """When, by the wall's clock, all is spent that may be."""
        if self.is_free:
            return self.began + self.free_seconds
        return self.clock.wall() + self.allowed(step_seconds) - self.spent

    def pays(self, step_seconds: float, seconds_left: float) -> bool:
        """Is a whole search worth its time, where so many seconds are left and no more?"""
        return self.is_free or seconds_left >= PATIENCE * search_seconds(step_seconds)

    def promises(self, ratio: float, seconds: float, seconds_left: float) -> bool:
        """Is a plan whose copy of a step is so many times as fast worth `seconds` of trying? What it may save
        is `hoped` from here on.
        """
        self.hoped = seconds_left * (1.0 - 1.0 / (max(ratio, 1.0) + CLOSE))
        return self.is_free or self.hoped >= PAYS * seconds

    def begins(self, step_seconds: float, seconds_left: float = math.inf) -> bool:
        """May the first of a search be spent, and is enough left of the run for the rest of it?"""
        is_worth = self.is_free or seconds_left >= least_seconds(step_seconds)
        return is_worth and self.affords(IMPORT_SECONDS + BEGIN_STEPS * step_seconds, step_seconds)

    def compiles(self, seconds: float) -> bool:
        """May a model be compiled now, which takes so many seconds?"""
        if self.is_free:
            return seconds <= SEARCHING_SHARE * (self.free_seconds - self.elapsed)
        return seconds <= COMPILING_SHARE * self._counted()

    def compiling_until(self, seconds: float) -> float:
        """When compiling that was to take so many seconds has to end, by the wall's clock."""
        most = self.free_seconds - self.elapsed if self.is_free else self._counted() / PATIENCE - self.spent
        return self.clock.wall() + max(LATE * seconds, most)

    def compiled(self, seconds: float) -> None:
        """So many seconds were spent on compiling; what is more than its share is paid from the rest."""
        self.compiling += seconds if self.is_free else min(seconds, COMPILING_SHARE * self._counted())

    def will_compile(self, seconds: float) -> bool:
        """May it be now, or when the run has become as long as it is said to be?"""
        return self.compiles(seconds) or seconds <= COMPILING_SHARE * (self.elapsed + self.coming())

    def _counted(self) -> float:
        """Seconds of the run so far, and of what is to come."""
        passed = self.elapsed
        return passed + min(self.coming(), TRUSTED * passed)


def _start(step_seconds: float) -> float:
    return max(START_SECONDS, search_seconds(step_seconds))


def least_seconds(step_seconds: float) -> float:
    """What must be left of a run, for a search to be begun."""
    return PATIENCE * (LEAST_SECONDS + BEGIN_STEPS * step_seconds)


def search_seconds(step_seconds: float) -> float:
    """What a first search takes, about."""
    return IMPORT_SECONDS + SEARCH_STEPS * step_seconds


def page_faults() -> int:
    """How often the system has given this process 4 KiB of memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
