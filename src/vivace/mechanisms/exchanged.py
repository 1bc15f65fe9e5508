"""Kernels of Vivace's own in the place of torch's, for as long as somebody wants them to compute."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial


class Exchanged:
    """`put` puts them in place, once in the process; while nobody has begun, they leave all to torch's own.

    `told` are those who have begun: each is called with what a kernel says of what it computed.
    """

    def __init__(self, put: Callable[[], object]) -> None:
        self.told: list[Callable[..., object]] = []
        self.put, self.is_there, self.lock = put, False, threading.Lock()
        os.register_at_fork(after_in_child=self._unlock)

    def _unlock(self) -> None:
        """In a process that was forked while another thread began, nobody is left who could unlock it."""
        self.lock = threading.Lock()

    def begin(self, told: Callable[..., object]) -> Callable[[], None]:
        """Let them compute until all who have begun have called what this returns. Raises what `put` does."""
        with self.lock:
            if not self.is_there:
                self.put()
                self.is_there = True
            self.told.append(told)
        return partial(self.told.remove, told)

    def tell(self, *what: int | str) -> None:
        """Tell all who have begun."""
        for each in tuple(self.told):
            each(*what)
