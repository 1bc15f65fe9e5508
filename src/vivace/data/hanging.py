"""Loader workers that hang: told from slow ones, named by what they read, and killed.

A worker that was killed is replaced like any other that died (see `vivace.training.feed`), so that a disk or
a lock that hung once costs minutes and not the run.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import psutil
from torch.utils.data import get_worker_info

from vivace.data.damage import path_of
from vivace.job import Batch

LEAST_SECONDS = 300.0  # below the ten minutes after which other ranks give up
MOST_TIMES = 20  # the slowest batch so far
BUSY_TIMES = 12  # the limit, for workers that are at work and come to no end
IDLE_SHARE, IDLE_BYTES = 0.001, 2**20  # of a core, and read: less is no work
_LOOKS = 30  # in the shortest limit
_ROWS, _ROW_BYTES = 64, 256
_Work = tuple[str, float, int]  # what is read, seconds of processor time, bytes read
_HEAD = struct.Struct("<IH")  # process, length of the text
_SAMPLE = struct.Struct("<IHq")  # instead of a text: process, _INDEX, the sample's index
_INDEX = 2**16 - 1


class Board:
    """What each worker reads at this moment. Forked workers share it; others have one of their own."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _ROWS * _ROW_BYTES)
        self._process, self._start = 0, 0

    def __reduce__(self) -> tuple[type[Board], tuple[()]]:
        return Board, ()

    def write(self, what: str | int) -> None:
        """Note what this process reads now: the index of a sample, a text, or empty for nothing."""
        process = os.getpid()
        if process != self._process:  # a worker inherits what its parent knew
            info = get_worker_info()
            row = info.id % _ROWS if info is not None else 0
            self._process, self._start = process, row * _ROW_BYTES
        start = self._start
        if isinstance(what, int) and abs(what) < 2**63:
            _SAMPLE.pack_into(self._memory, start, process, _INDEX, what)
            return
        text = str(what).encode()[: _ROW_BYTES - _HEAD.size]
        _HEAD.pack_into(self._memory, start, process, len(text))
        self._memory[start + _HEAD.size : start + _HEAD.size + len(text)] = text

    def reading(self) -> dict[int, str]:
        """What processes read, by their id; those that read nothing are left out."""
        found = {}
        for start in range(0, _ROWS * _ROW_BYTES, _ROW_BYTES):
            process, length = _HEAD.unpack_from(self._memory, start)
            if length == _INDEX:
                found[process] = f"sample {_SAMPLE.unpack_from(self._memory, start)[2]}"
            elif length:
                text = self._memory[start + _HEAD.size : start + _HEAD.size + length]
                found[process] = text.decode(errors="replace")
        return found


class HangWatch:
    """Looks, from a thread of its own, how long the run has waited for a batch.

    Workers that for `LEAST_SECONDS`, and for many times the slowest batch so far, neither computed nor read
    anything are killed. Time in which this process was stopped itself does not count. Where no workers are
    known, `tell` says that the run waits.

    Args:
        tell: ``(sentence) -> None``, called from the thread where nothing can be killed.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.tell = tell
        self.board = Board()
        self.found = ""  # of the workers killed last
        self._slowest, self._wait, self._told = 0.0, 0, 0
        self._waiting = False
        self._before: set[int] | None = None
        self._workers: set[int] = set()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._end.clear()
        self._thread = threading.Thread(target=self._look, name="vivace-hang-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        assert self._thread is not None
        self._thread.join()

    def begin_pass(self) -> None:
        """The next batch is the first of a pass: processes that start with it are the loader's workers."""
        self._before = children()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """While entered, the run waits for a batch."""
        begin = time.monotonic()
        self._wait, self._waiting, self.found = self._wait + 1, True, ""
        try:
            yield
            self._slowest = max(self._slowest, time.monotonic() - begin)
            if self._before is not None:
                self._workers, self._before = self._started(), None
        finally:
            self._waiting = False

    def found_in(self, loader: object) -> str:
        """Of the worker that was killed because it hung, with the file that it read; or empty."""
        index = re.search(r"sample (\d+)", self.found)
        path = path_of(getattr(loader, "dataset", None), int(index[1])) if index else ""
        return f"{self.found} ('{path}')" if path else self.found

    def watched(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches; while one is waited for, the run waits for it."""
        self.begin_pass()
        following = iter(batches)
        while True:
            with self.waiting():
                try:
                    batch = next(following)
                except StopIteration:
                    return
            yield batch

    def _started(self) -> set[int]:
        now = children()
        return (self._workers & now) | (now - self._before if self._before is not None else set())

    def _look(self) -> None:
        tick = LEAST_SECONDS / _LOOKS
        wait, ticks, idle_since, before = 0, 0, 0, self._work()
        while True:
            begin = time.monotonic()
            if self._end.wait(tick):
                return
            stopped = time.monotonic() - begin > 2 * tick + 1
            if not self._waiting or self._wait != wait or stopped:
                wait, ticks, idle_since, before = self._wait, 0, 0, self._work()
                continue
            ticks += 1
            limit = max(LEAST_SECONDS, MOST_TIMES * self._slowest)
            now, idle = self._work(), (ticks - idle_since) * tick
            if any(_has_worked(before.get(process), work, idle) for process, work in now.items()):
                idle_since, before, idle = ticks, now, 0.0
            stuck = self._slowest and ticks * tick >= BUSY_TIMES * limit
            if idle >= limit or stuck:
                self._end_hang(ticks * tick)
                wait = 0

    def _suspects(self) -> dict[int, str]:
        """The workers, with what they read; only those that read anything where that is known."""
        started, reading = self._started(), self.board.reading()
        known = {process: text for process, text in reading.items() if process in started}
        return known or dict.fromkeys(started, "")

    def _work(self) -> dict[int, _Work]:
        """The work so far of every suspect; without any, of this process."""
        found = {}
        own = {os.getpid(): self.board.reading().get(os.getpid(), "")}
        for process, text in (self._suspects() or own).items():
            with contextlib.suppress(psutil.Error, OSError):
                one: Any = psutil.Process(process)
                times = one.cpu_times()
                found[process] = (text, times.user + times.system, _read_bytes(one))
        return found

    def _end_hang(self, seconds: float) -> None:
        suspects = self._suspects()
        what = "; ".join(filter(None, suspects.values())) or self.board.reading().get(os.getpid(), "")
        self.found = f"has hung for {seconds:.0f} seconds" + (f" at {what}" if what else "")
        for process in suspects:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        if not suspects and self._told != self._wait:
            self._told = self._wait
            self.tell(f"reading the data {self.found}; in worker processes it could be ended")


def _read_bytes(process: Any) -> int:
    """What a process has read so far; 0 where the system does not count that, or does not tell."""
    try:
        return int(process.io_counters().read_chars)
    except (AttributeError, psutil.AccessDenied, OSError):
        return 0


def _has_worked(before: _Work | None, now: _Work, seconds: float) -> bool:
    if before is None or before[0] != now[0]:
        return True
    return now[1] - before[1] > IDLE_SHARE * seconds + 0.02 or now[2] - before[2] > IDLE_BYTES


def children() -> set[int]:
    """The processes that this process' main thread has started."""
    main = os.getpid()
    try:
        return set(map(int, Path(f"/proc/{main}/task/{main}/children").read_text().split()))
    except OSError:
        return {child.pid for child in psutil.Process().children()}
