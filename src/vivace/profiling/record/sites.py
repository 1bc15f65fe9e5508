"""The person's own line behind a call."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from pathlib import Path

import torch

_ROOMS = ("profiling", "work", "observing", "session", "training", "data", "processes", "technique")
TORCH = os.path.join(os.path.dirname(torch.__file__), "")  # a person's folder may be called so, too
_PACKAGE = Path(__file__).parents[2]
_OWN = (
    TORCH,
    *(os.path.join(_PACKAGE, room, "") for room in _ROOMS),
    contextlib.__file__,
    functools.__file__,
    "<frozen",
)


def calling_site() -> str:
    """``file:line`` of the innermost caller outside of torch and Vivace."""
    frame = sys._getframe(2)
    first = frame
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_OWN):
            return f"{name}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return f"{first.f_code.co_filename}:{first.f_lineno}"
