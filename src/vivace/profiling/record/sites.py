"""The person's own line behind a call."""

from __future__ import annotations

import sys

_ROOMS = ("profiling", "work", "observing", "session", "training", "data", "processes", "technique")
_OWN = (*(f"vivace/{room}/" for room in _ROOMS), "/torch/", "<frozen", "contextlib.py", "functools.py")


def calling_site() -> str:
    """``file:line`` of the innermost caller outside of torch and Vivace."""
    frame = sys._getframe(2)
    first = frame
    while frame is not None:
        name = frame.f_code.co_filename
        if not any(part in name for part in _OWN):
            return f"{name}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return f"{first.f_code.co_filename}:{first.f_lineno}"
