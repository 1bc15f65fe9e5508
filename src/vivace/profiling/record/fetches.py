"""What fetching a batch does: a thread that looks at the fetching code every few milliseconds.

It runs in the process that trains while a batch is fetched there, and in loader workers, forked or spawned,
which write what they saw into the record's folder.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.data import get_worker_info

from vivace.profiling.record import RECORD
from vivace.profiling.record.clock import Clock
from vivace.profiling.record.guard import Guard
from vivace.profiling.record.hooks import Patches
from vivace.torch_internals.loaders import FETCHERS

EVERY_SECONDS = 0.004
WRITE_SECONDS = 0.5
_FETCHING = {("fetch", "fetch.py"), ("following", "drive.py")}  # a DataLoader's fetcher, or our own loop


class FetchSampler:
    """Samples by the person's line and by the innermost frame; seconds and batches of loader workers."""

    def __init__(self, clock: Clock, folder: Path, guard: Guard) -> None:
        self.clock, self.folder, self.guard = clock, folder, guard
        self._patches = Patches(guard)
        self.seen: Counter[str] = Counter()
        self._stop = threading.Event()
        self._fetching = threading.get_ident()
        self.pid = os.getpid()
        self._worker: _Worker | None = None
        self._thread: threading.Thread | None = None

    def install(self) -> None:
        """Watch the thread that trains, and every worker from its first batch on."""
        for kind in FETCHERS:
            self._patches.replace(kind, "fetch", self._fetch)

    def start(self) -> None:
        """Begin to look at the thread that trains."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=self.guard.looking(self._look), daemon=True, name="vivace-fetches"
            )
            self._thread.start()

    def stop(self) -> None:
        """End the thread, and leave torch as it was."""
        self._stop.set()
        self._patches.restore()

    def result(self) -> dict[str, Any]:
        """Samples of where fetching was, and the workers' own seconds a batch."""
        seen, batches, seconds = Counter(self.seen), 0, 0.0
        for file in self.folder.glob("worker-*.json"):
            try:
                document = json.loads(file.read_text(encoding="utf-8"))
            except ValueError:
                continue
            seen.update(document["seen"])
            batches += document["batches"]
            seconds += document["seconds"]
            file.unlink()
        return {"seen": seen.most_common(12), "worker_batches": batches, "worker_seconds": seconds}

    def _fetch(self, original: Callable[..., Any]) -> Any:
        def fetch(fetcher: object, indices: object) -> Any:
            if get_worker_info() is None:
                if os.getpid() == self.pid and self.clock.inside == "data":
                    self._fetching = threading.get_ident()
                    self.start()
                return original(fetcher, indices)
            if self._worker is None:
                self._worker = _Worker(self.folder, self.guard)
            begin = time.perf_counter()
            try:
                return original(fetcher, indices)
            finally:
                self._worker.fetched(time.perf_counter() - begin)

        return fetch

    def _look(self) -> None:
        while not self._stop.wait(EVERY_SECONDS):
            if self.clock.inside == "data":
                site = _site(self._fetching)
                if site:
                    self.seen[site] += 1


class _Worker:
    """The same in a worker process, until the profile is over."""

    def __init__(self, folder: Path, guard: Guard) -> None:
        self.path = folder / f"worker-{os.getpid()}.json"
        self.seen: Counter[str] = Counter()
        self.batches, self.seconds, self.written = 0, 0.0, time.monotonic()
        self.fetcher = threading.get_ident()
        self.watches = True
        threading.Thread(target=guard.looking(self._look), daemon=True, name="vivace-fetches").start()

    def fetched(self, seconds: float) -> None:
        """One more batch. Where the record stands the profile is over, and so is this."""
        if not self.watches:
            return
        self.batches += 1
        self.seconds += seconds
        if time.monotonic() - self.written > WRITE_SECONDS or self.batches <= 2:
            self.written = time.monotonic()
            self.watches = not (self.path.parent / RECORD).exists()
            document = {"seen": self.seen, "batches": self.batches, "seconds": self.seconds}
            if self.watches:
                self.path.write_text(json.dumps(document), encoding="utf-8")

    def _look(self) -> None:
        while self.watches:
            time.sleep(EVERY_SECONDS)
            site = _site(self.fetcher)
            if site:
                self.seen[site] += 1


def _site(thread: int) -> str:
    """``file:line function | innermost file:line function`` of a thread that is fetching."""
    frame = sys._current_frames().get(thread)
    names: list[str] = []
    fetching = False
    while frame is not None:
        code = frame.f_code
        if (code.co_name, os.path.basename(code.co_filename)) in _FETCHING:
            fetching = True
            break
        names.append(f"{code.co_filename}:{frame.f_lineno or code.co_firstlineno} {code.co_name}")
        frame = frame.f_back
    if not fetching or not names:
        return ""
    theirs = [name for name in names if "site-packages" not in name and "/lib/python" not in name]
    return f"{(theirs or names)[0]} | {names[0]}"
