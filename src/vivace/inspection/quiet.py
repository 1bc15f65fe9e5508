"""Are other processes busy on our cores, and how slow are we? A step on all cores waits for its slowest
thread.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from vivace import words
from vivace.inspection.limits import usable_cores

TOLERATED_SHARE = 0.08  # of our cores
LEAST_COMPUTED = 0.2  # seconds, over which it is told how slow a thread is


class ForeignLoad:
    """Compares the busy time of our cores with the time that our own processes used.

    Never disturbed where the system does not tell, or where a container's quota is below the cores that it
    may run on, because others are then expected on them.
    """

    def __init__(self, own: Sequence[int]) -> None:
        self._own = [os.getpid(), *own]
        self._cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        if usable_cores() < len(self._cores):
            self._cores = []
        self._last = self._clocks()
        self.largest = 0.0

    def disturb(self) -> bool:
        """Did others use more than the tolerated share of our cores since the last call?"""
        (busy, idle, own), now = self._last, self._clocks()
        self._last = now
        whole = now[0] + now[1] - busy - idle
        if whole <= 0:
            return False
        share = (now[0] - busy - (now[2] - own)) / whole
        self.largest = max(self.largest, share)
        return share > TOLERATED_SHARE

    def sentence(self) -> str:
        """What to say beside an unsteady measurement."""
        if self.largest <= TOLERATED_SHARE:
            return ""
        used = words.percent(self.largest)
        return f"; other processes used up to {used} of the processor: measure when it is idle"

    def _clocks(self) -> tuple[float, float, float]:
        """Seconds that our cores were busy, were idle, and that our own processes used."""
        busy = idle = 0.0
        tick = os.sysconf("SC_CLK_TCK")
        names = {f"cpu{core}" for core in self._cores}
        with contextlib.suppress(OSError):
            for line in Path("/proc/stat").read_text().splitlines():
                name, *fields = line.split()
                if name in names:
                    numbers = [int(field) / tick for field in fields[:8]]
                    idle += numbers[3] + numbers[4]
                    busy += sum(numbers) - numbers[3] - numbers[4]
        return busy, idle, _seconds(self._own)


def computed_and_waited() -> tuple[float, float] | None:
    """Seconds that the thread which calls has computed, and that it waited for a processor, ready to; None
    where the system does not tell.

    From its ``schedstat``: https://docs.kernel.org/scheduler/sched-stats.html
    """
    try:
        computed, waited, _ = Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()
        return int(computed) * 1e-9, int(waited) * 1e-9
    except (OSError, ValueError):
        return None


class Slowed:
    """How many times as long as alone a thread takes to compute, as others use the processor too.

    It is told by the seconds for which the thread was ready to compute and had no processor.
    """

    def __init__(self, clocks: Callable[[], tuple[float, float] | None] = computed_and_waited) -> None:
        self._clocks = clocks
        self._last, self._times = clocks(), 1.0

    def __call__(self) -> float:
        """Of the thread that calls, since then, or since a call before which it had computed for a while; 1
        where the system does not tell.
        """
        before, now = self._last, self._clocks()
        if before is not None and now is not None and now[0] - before[0] >= LEAST_COMPUTED:
            self._last, self._times = now, 1.0 + max(0.0, now[1] - before[1]) / (now[0] - before[0])
        return self._times


def _seconds(pids: Sequence[int]) -> float:
    """That these processes and all below them used, those that have ended among them; each counts once, for
    most lie below the first.
    """
    members: dict[int, psutil.Process] = {}
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            members |= {one.pid: one for one in (process, *process.children(recursive=True))}
    total = 0.0
    for member in members.values():
        with contextlib.suppress(psutil.Error):
            times = member.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total
