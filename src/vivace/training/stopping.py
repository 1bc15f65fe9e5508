"""Stopping on request: the first signal asks for a stop after the step, a further Ctrl-C ends at once."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

# Ctrl-C; a scheduler's or torchrun's request; a terminal that is gone; Slurm's --signal=USR1
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")


class StopRequest:
    """While entered, the `SIGNALS` only set `signal_name`; a further SIGINT raises KeyboardInterrupt.

    SIGHUP and SIGUSR1 are left to who has taken them already, such as nohup.

    Args:
        quiet_seconds: a SIGINT so soon after the first request is taken for the same one, because torchrun
            repeats to its ranks the Ctrl-C that the terminal has sent them already.
    """

    num_ended = 0  # of all that this process has had

    def __init__(self, quiet_seconds: float = 0.0) -> None:
        self.signal_name = ""
        self._quiet_seconds = quiet_seconds
        self._asked_at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = _handle(SIGNALS, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        StopRequest.num_ended += 1
        _give_back(self._before)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        again = self.signal_name and time.monotonic() - self._asked_at >= self._quiet_seconds
        if again and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.signal_name:
            self.signal_name = signal.Signals(number).name
            self._asked_at = time.monotonic()


@contextmanager
def ends_like_ctrl_c(*, once: bool = False) -> Iterator[None]:
    """While entered, SIGTERM and SIGHUP raise KeyboardInterrupt.

    With `once`, all that come after the first, also a Ctrl-C, are not heard: torchrun repeats to its ranks
    what the terminal has sent them already, and ends them where they take too long.
    """
    told = False

    def first(number: int, frame: FrameType | None) -> None:
        nonlocal told
        if not told:
            told = True
            raise KeyboardInterrupt

    names = ("SIGINT", "SIGTERM", "SIGHUP") if once else ("SIGTERM", "SIGHUP")
    before = _handle(names, first if once else signal.default_int_handler)
    try:
        yield
    finally:
        _give_back(before)


@contextmanager
def tells_first() -> Iterator[None]:
    """While entered, SIGTERM is not heard once a `StopRequest` has ended: torchrun ends the ranks that are
    left as soon as one has failed, and what these found, and kept, is still to be told.
    """
    ended = StopRequest.num_ended

    def answer(number: int, frame: FrameType | None) -> None:
        if StopRequest.num_ended == ended:
            _give_back(before)
            signal.raise_signal(number)

    before = _handle(("SIGTERM",), answer)
    try:
        yield
    finally:
        _give_back(before)


def _handle(names: tuple[str, ...], handler: Callable[[int, FrameType | None], object]) -> dict[int, Any]:
    """Let `handler` answer signals, in the main thread, which alone may; returns who answered them before."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    found = [signal.Signals[name] for name in names]
    free = [
        number
        for number in found
        if number in (signal.SIGINT, signal.SIGTERM) or signal.getsignal(number) is signal.SIG_DFL
    ]
    return {number: signal.signal(number, handler) for number in free}


def _give_back(before: dict[int, Any]) -> None:
    for number, handler in before.items():
        if handler is not None:  # that of another language, which Python cannot give back
            signal.signal(number, handler)
