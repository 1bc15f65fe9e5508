"""Stopping on request: the first SIGTERM or Ctrl-C asks for a stop after the step, the second one ends."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any, Self

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """While entered, SIGTERM and SIGINT only set `signal_name`; a further SIGINT raises KeyboardInterrupt.

    Args:
        quiet_seconds: a SIGINT so soon after the first request is taken for the same one, because torchrun
        repeats
            to its ranks the Ctrl-C that the terminal has sent them already.
    """

    def __init__(self, quiet_seconds: float = 0.0) -> None:
        self.signal_name = ""
        self._quiet_seconds = quiet_seconds
        self._asked_at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        again = self.signal_name and time.monotonic() - self._asked_at >= self._quiet_seconds
        if again and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.signal_name:
            self.signal_name = signal.Signals(number).name
            self._asked_at = time.monotonic()
