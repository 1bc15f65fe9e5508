"""The variables of functions that are running, read without leaving a trace in them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import FrameType
from typing import Any

READS_ITSELF = {"locals", "vars", "dir", "eval", "exec"}


def variables(frame: FrameType) -> Mapping[str, Any]:
    """By name. Before Python 3.13 a frame keeps what it was asked for: tensors that the function has long let
    go of, in a dictionary that its own `locals()` gives as well. It is emptied, or not asked for.
    """
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # a module's, which are its globals
        return frame.f_locals
    if READS_ITSELF & set(frame.f_code.co_names):
        return {}
    kept = frame.f_locals
    found = dict(kept)
    if isinstance(kept, dict):
        kept.clear()
    return found
