"""Progress in a notebook: one line below the cell, which is rewritten while the verb works."""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any

from vivace.events import Event, EventKind, OnEvent
from vivace.pages.status import Status

EVERY_SECONDS = 0.5


def listening(on_event: OnEvent | None) -> OnEvent | None:
    """The person's listener; in a notebook, where they gave none, one that shows the progress."""
    if on_event is not None or "ipykernel" not in sys.modules:
        return on_event
    shell = importlib.import_module("IPython").get_ipython()
    return Line() if shell is not None and getattr(shell, "kernel", None) is not None else None


class Line:
    """Shows the `Status` of what it hears; notices stand above it."""

    def __init__(self) -> None:
        self._status = Status()
        self._shown_at = 0.0
        self._handle: Any = None

    def __call__(self, event: Event) -> None:
        """Hear one event, and show it where the last one was shown some time ago."""
        self._status(event)
        if event.kind == EventKind.NOTICE:
            print(event.payload["text"], file=sys.stderr)
        now = time.monotonic()
        if now - self._shown_at >= EVERY_SECONDS or event.kind in (EventKind.PHASE, EventKind.STOP):
            self._shown_at = now
            self._show(self._status.line)

    def _show(self, text: str) -> None:
        content = {"text/plain": text}
        if self._handle is None:
            display = importlib.import_module("IPython.display").display
            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)
