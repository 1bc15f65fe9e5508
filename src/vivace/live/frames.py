"""The variables of functions that are running, read without leaving a trace in them."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Mapping
from types import CodeType, FrameType
from typing import Any

READS_ITSELF = {"locals", "vars", "dir", "eval", "exec"}
GLOBALLY = ("LOAD_GLOBAL", "LOAD_NAME")


def variables(frame: FrameType) -> Mapping[str, Any]:
    """By name. Before Python 3.13 a frame keeps what it was asked for: tensors that the function has long let
    go of, in a dictionary that its own `locals()` gives as well. It is emptied, or not asked for.
    """
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # a module's, which are its globals
        return frame.f_locals
    if _reads_itself(frame.f_code):
        return {}
    kept = frame.f_locals
    found = dict(kept)
    if isinstance(kept, dict):
        kept.clear()
    return found


@functools.lru_cache(maxsize=64)
def _reads_itself(code: CodeType) -> bool:
    """Does a function call one of these? `model.eval()`, which most that train call, is another matter."""
    if not READS_ITSELF & set(code.co_names):
        return False
    read = (step for step in dis.get_instructions(code) if step.argval in READS_ITSELF)
    return any(step.argval != "eval" or step.opname in GLOBALLY for step in read)
