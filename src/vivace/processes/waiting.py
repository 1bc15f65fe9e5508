"""How long a thread that waits for the others spins before it sleeps: on a busy processor, not for long."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import psutil

LOOK_SECONDS = 0.1
BUSY_SHARE = 0.3  # of our cores, computing for others
# Turns. GNU's OpenMP takes 300,000, and so keeps a core for longer than the kernel
# leaves one to anybody, while the thread that it waits for has none.
SHORT = {"GOMP_SPINCOUNT": "10000"}
OWN = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # where the person has decided


def waiting() -> dict[str, str]:
    """Variables for a process that has not loaded PyTorch yet: short spinning where others compute at our
    priority now; none where they do not, or where the person has set one.

    It looks for a tenth of a second. What is computed stays the same, bit for bit. Source: the manual of
    GNU's OpenMP, GOMP_SPINCOUNT.
    """
    if any(name in os.environ for name in OWN) or not hasattr(os, "sched_getaffinity"):
        return {}
    before, own, begin = _computed(), _worked(), time.monotonic()
    time.sleep(LOOK_SECONDS)
    ours = sum(seconds - own.get(process, 0.0) for process, seconds in _worked().items())
    others = _computed() - before - ours
    share = others / (time.monotonic() - begin) / len(os.sched_getaffinity(0))
    return dict(SHORT) if share > BUSY_SHARE else {}


def crowded() -> bool:
    """Do others compute beside us? What `waiting` found as the command began stays."""
    return SHORT.items() <= os.environ.items() or bool(waiting())


def _worked() -> dict[int, float]:
    """Seconds that this process has computed, and each that it has started: they import while it does."""
    found = {os.getpid(): time.process_time()}
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                used = process.cpu_times()
                found[process.pid] = used.user + used.system
    return found


def _computed() -> float:
    """Seconds that the cores which we may use computed for processes of our priority or above."""
    nice = os.getpriority(os.PRIO_PROCESS, 0) > 0
    names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    ticks = 0
    with contextlib.suppress(OSError):
        for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
            name, *fields = line.split()
            if name in names:
                user, lower, system, *_ = map(int, fields)
                ticks += user + system + (lower if nice else 0)  # what is nice steps back for what is not
    return ticks / os.sysconf("SC_CLK_TCK")
