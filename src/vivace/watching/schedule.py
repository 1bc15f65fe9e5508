"""Which steps are watched, and what the watching may cost."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Hashable

# Round numbers with many divisors: what happens every 24, 100, 200 or 1000 steps meets them soon. From 200 on
# all are multiples of it, so that its odd multiples are, too: the even ones may be watched one step later.
INTERVALS = (
    *(1, 2, 4, 6, 12, 24, 60, 100, 200, 400, 600, 1200, 1800, 3000, 6000, 12000, 18000, 30000, 60000),
    *(120000, 180000, 300000),
)
EVENTS_SHARE = 0.5  # of what may be spent: the rest is for the regular steps
RESTS_SHARE = 0.2  # of what may be spent, kept for looks between two steps, whatever the first step took


class Schedule:
    """Says which steps of a run to watch, so that watching takes at most `share` of the run's time.

    Watched are the first step, the first of an epoch (after an evaluation, with new settings), the last of
    one, the first of each batch shape, and regular ones at an interval that follows from what a watched step
    costs. Only the first is watched whatever it costs. Of a run whose length is known, half of what may be
    spent is there from the beginning.

    Args:
        share: of the run's time.
        total_steps: of this process, where known.
        clock: seconds.
    """

    def __init__(
        self, share: float, total_steps: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.share, self.total_steps, self.clock = share, total_steps, clock
        self.began = self.first_ended = clock()
        self.spent = self.spent_on_events = self.spent_on_rests = 0.0
        self.cost: float | None = None  # seconds, of a watched step
        self.rest_cost = 0.0  # seconds, of a look at what is held between two steps
        self.steps = 0  # begun so far
        self._spent_on_first = 0.0
        self._interval: int | None = None
        self._phase = 0
        self._last_index = -1  # of the step before, in its epoch
        self.end: int | None = None  # the last index of an epoch
        self._shapes: set[Hashable] = set()
        self._again = True

    def again(self) -> None:
        """Watch the next step, whatever it costs: the run goes on in another way."""
        self._again = True

    def due(self, step: int, batch_index: int, shape: Hashable) -> str:
        """Why to watch a step, its number in the run counted from 1; empty where it is left out."""
        self.steps += 1
        if self.steps == 2:
            self.first_ended, self._spent_on_first = self.clock(), self.spent
        if batch_index == 0 and self._last_index >= 0:
            self.end = self._last_index
        self._last_index = batch_index
        why = self._why(step, batch_index, shape)
        if why:
            self._shapes.add(shape)
        return why

    def _why(self, step: int, batch_index: int, shape: Hashable) -> str:
        if self._again:
            self._again = False
            return "the first"
        if self.steps & (self.steps - 1) == 0:
            self._interval = self._affordable_interval()
        interval, cost = self._interval, self.cost or 0.0
        if interval is not None and step % interval == self._phase % interval and self._can_afford(cost):
            self._phase = 1 - self._phase  # what counts from 0 is met, too
            return "regular"
        last = batch_index == self.end
        if (batch_index == 0 or last or shape not in self._shapes) and self._can_afford(cost, event=True):
            return "an epoch begins" if batch_index == 0 else "an epoch ends" if last else "a new shape"
        return ""

    def watched(self, seconds: float, cause: str) -> None:
        """Account for a watched step that took `seconds` more than a plain one."""
        self.spent += seconds
        self.spent_on_events += 0.0 if cause == "regular" else seconds
        # The first one has to find out more, and takes about twice as long.
        self.cost = seconds / 2 if self.cost is None else 0.5 * (self.cost + seconds)
        self._interval = self._affordable_interval()

    def can_rest(self) -> bool:
        """Can two looks at what is held between two steps be paid for: one to note it, one to compare?"""
        cost = self.rest_cost or 0.1 * (self.cost or 0.0)
        return self.spent_on_rests + 2 * cost <= RESTS_SHARE * self._allowance()

    def rested(self, seconds: float) -> None:
        """Account for such a look."""
        self.spent += seconds
        self.spent_on_rests += seconds
        self.rest_cost = max(0.5 * self.rest_cost, seconds)

    @property
    def step_seconds(self) -> float | None:
        """Of a step with all that belongs to a run, but not its watching; unknown at first."""
        if self.steps < 3:
            return None
        watching = self.spent - self._spent_on_first
        return max(1e-9, (self.clock() - self.first_ended - watching) / (self.steps - 2))

    @property
    def run_seconds(self) -> float:
        """That the run has taken so far, in this process."""
        return self.clock() - self.began

    @property
    def first_part(self) -> float:
        """The part of what was spent that went to the first step, which is watched whatever it costs."""
        return self._spent_on_first / self.spent if self.steps > 1 and self.spent else 1.0

    def _allowance(self) -> float:
        """Seconds that may have been spent by now."""
        elapsed, step = self.clock() - self.began, self.step_seconds
        if self.total_steps is None or step is None:
            return self.share * elapsed
        return self.share * (elapsed + 0.5 * step * max(0, self.total_steps - self.steps))

    def _can_afford(self, cost: float, *, event: bool = False) -> bool:
        allowed = self._allowance() * (1.0 - RESTS_SHARE if self.rest_cost else 1.0)
        if event and self.spent_on_events + cost > EVENTS_SHARE * allowed:
            return False
        return self.spent - self.spent_on_rests + cost <= allowed

    def _affordable_interval(self) -> int | None:
        step, cost = self.step_seconds, self.cost
        if step is None or cost is None:
            return None
        wanted = cost / (self.share * step)
        if self.total_steps is not None:
            left = max(1, self.total_steps - self.steps)
            rest = self.share * (self.clock() - self.began + step * left) - self.spent
            wanted = left * cost / rest if rest > 0 else float("inf")
        index = bisect.bisect_left(INTERVALS, wanted)
        return INTERVALS[index] if index < len(INTERVALS) else None
