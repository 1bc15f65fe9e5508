"""Which rank holds up the others while all go on: what each needs for its own part of a step."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

from vivace.words import duration, times

LEAST_SECONDS = 5.0  # over which the ranks are compared
LEAST_STEPS = 5
SLOWER_TIMES = 1.5
LEAST_SHARE = 0.1  # of a step that the others lose by it
PARTS = ("data", "forward pass")


@dataclasses.dataclass
class Own:
    """Seconds in which this rank waited for nobody: for its data, and for its forward passes.

    The backward pass is left out: in it the exchange runs.
    """

    data: float = 0.0
    forward: float = 0.0
    _since: float = 0.0

    def fetches(self) -> None:
        """Called before a batch is asked for: the wait for it begins."""
        self._since = time.perf_counter()

    def fetched(self) -> None:
        """Called when the batch has come: the wait for it counts."""
        self.data += time.perf_counter() - self._since

    def in_forward(self, following: Callable[[Any], Any], batch: object) -> Any:
        """A forward pass, with its time taken."""
        begin = time.perf_counter()
        try:
            return following(batch)
        finally:
            self.forward += time.perf_counter() - begin

    def take(self) -> tuple[float, float]:
        """The seconds since they were taken last."""
        found = self.data, self.forward
        self.data = self.forward = 0.0
        return found


class Pace:
    """Sums up what every rank needed, and says once who holds up the others by what."""

    def __init__(self) -> None:
        self._rows: list[list[float]] = []
        self._steps, self._seconds = 0, 0.0
        self._told: tuple[int, str] | None = None

    def add(self, rows: list[list[float]], steps: int, seconds: float) -> str:
        """A sentence where one rank is clearly slower than the others, or an empty one.

        Args:
            rows: of every rank the seconds for each of `PARTS` in these `steps`, which took `seconds`.
        """
        before = self._rows or [[0.0] * len(PARTS) for _ in rows]
        self._rows = [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(before, rows, strict=True)]
        self._steps, self._seconds = self._steps + steps, self._seconds + seconds
        if self._seconds < LEAST_SECONDS or self._steps < LEAST_STEPS:
            return ""
        found = self._judged()
        self._rows, self._steps, self._seconds = [], 0, 0.0
        return found

    def _judged(self) -> str:
        own = [sum(row) for row in self._rows]
        slowest = max(range(len(own)), key=own.__getitem__)
        others = statistics.median(seconds for rank, seconds in enumerate(own) if rank != slowest)
        lost = own[slowest] - others
        if own[slowest] < SLOWER_TIMES * others or lost < LEAST_SHARE * self._seconds:
            return ""
        excess = [
            seconds - statistics.median(row[part] for rank, row in enumerate(self._rows) if rank != slowest)
            for part, seconds in enumerate(self._rows[slowest])
        ]
        part = PARTS[max(range(len(PARTS)), key=excess.__getitem__)]
        if self._told == (slowest, part):
            return ""
        self._told = slowest, part
        step = self._seconds / self._steps
        return (
            f"rank {slowest} is {times(own[slowest] / max(others, 1e-9))} slower than the others, by its "
            f"{part}: they wait for it {duration(lost / self._steps)} of a step's {duration(step)}"
        )
