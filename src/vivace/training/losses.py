"""Loader workers that die: noticed between two steps, never in the middle of one."""

from __future__ import annotations

import gc
import signal
import threading
from typing import Any, Self

from vivace.torch_internals.loaders import handle_deaths, raise_if_worker_died

MOST_TRIES = 3  # at one place: after that a sample kills whoever reads it


class WorkerWatch:
    """While entered, the death of a loader's worker raises in `check` or in the loader, and nowhere else.

    torch raises from a signal handler at any bytecode of the main thread, also between two halves of an
    update of the weights. A step that is cut in two could not be taken again.
    """

    def __init__(self) -> None:
        self._torchs: Any = None
        self._place, self._tries = "", 0

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            handle_deaths()  # it comes once in a process: let it be before ours
            self._torchs = signal.signal(signal.SIGCHLD, _wait)
        return self

    def __exit__(self, *_: object) -> None:
        if self._torchs is not None:
            signal.signal(signal.SIGCHLD, self._torchs)

    def check(self) -> None:
        """Raises RuntimeError where a worker has died. While a loader waits for a batch, it looks itself."""
        raise_if_worker_died()

    def may_try_again(self, place: str) -> bool:
        """Another death: have there been fewer than `MOST_TRIES` at this place? Forgets the dead loader."""
        self._tries = self._tries + 1 if place == self._place else 1
        self._place = place
        gc.collect()  # its iterator stands for dead workers as long as a frame of the traceback holds it
        return self._tries < MOST_TRIES


def _wait(*_: object) -> None: ...
