"""Who asks tensors for their values: each question makes the host wait for the device."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from vivace.profiling.record.clock import Clock
from vivace.profiling.record.guard import Guard
from vivace.profiling.record.hooks import Patches
from vivace.profiling.record.sites import calling_site

QUESTIONS = (
    "item", "tolist", "numpy", "cpu",
    "__bool__", "__float__", "__int__", "__index__", "__repr__", "__format__",
)  # fmt: skip
_NOT_THEIRS = tuple(os.path.join(os.path.dirname(path), "") for path in (torch.__file__, __file__))
LOOP_SECONDS = 0.002  # asked again within this time: a loop


class WaitWatch:
    """Counts and times the questions by the person's file and line; those of a data set are its fetching."""

    def __init__(self, clock: Clock, guard: Guard) -> None:
        self.clock, self.guard = clock, guard
        self.sites: dict[str, dict[str, float]] = {}
        self._patches = Patches(guard)
        self.num_steps = 0
        self._inside = False
        self._last = 0.0  # when the last question was answered, whoever asked

    def install(self) -> None:
        """Patch what asks the device for a value, to time it."""
        for name in QUESTIONS:
            self._patches.replace(torch.Tensor, name, self._timed)
        if torch.cuda.is_available():
            self._patches.replace(torch.cuda, "synchronize", self._timed)

    def new_step(self) -> None:
        """What is asked now is not in a loop with what was asked before."""
        self.num_steps += 1
        for row in self.sites.values():
            row["last"] = 0.0

    def restore(self) -> None:
        """Give torch back the functions that `install` has patched."""
        self._patches.restore()

    def result(self) -> list[dict[str, Any]]:
        """Sites by their seconds, the costliest first; sums over all watched steps. Nothing after a fault."""
        if self.guard.off:
            return []
        costliest = sorted(self.sites.items(), key=lambda item: -item[1]["span"])
        return [{"site": site, **values} for site, values in costliest[:20]]

    def _timed(self, original: Callable[..., Any]) -> Any:
        def ask(*arguments: object, **keywords: object) -> Any:
            # float(tensor) asks item() in turn; torch's own optimizers ask for their step counts. The frame
            # between this one and theirs is the guard's.
            fetching = self.clock.inside == "data"
            if self._inside or fetching or sys._getframe(2).f_code.co_filename.startswith(_NOT_THEIRS):
                return original(*arguments, **keywords)
            self._inside = True
            entered = time.perf_counter()
            row = self._row(calling_site(), entered)
            begin = time.perf_counter()
            try:
                return original(*arguments, **keywords)
            finally:
                self._inside = False
                self._add(row, entered, begin, time.perf_counter())

        return ask

    def _row(self, site: str, now: float) -> dict[str, float]:
        if site not in self.sites:
            self.sites[site] = {"count": 0, "seconds": 0.0, "span": 0.0, "last": now}
        return self.sites[site]

    def _add(self, row: dict[str, float], entered: float, begin: float, end: float) -> None:
        row["count"] += 1
        row["seconds"] += end - begin
        row["span"] += end - begin
        # Asked again soon: the loop around it is part of what the questions cost, and our own notes are not.
        # Lines that take turns in one loop share it: each is charged from the answer before, of any line.
        if 0 < entered - row["last"] < LOOP_SECONDS:
            row["span"] += entered - self._last
        row["last"] = self._last = time.perf_counter()
