"""The variables of functions that are running, read without leaving a trace in them."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Mapping
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any

READS_ITSELF = {"locals", "vars", "dir", "eval", "exec"}
OF_ANOTHER = {"vars", "dir"}  # where they are given one
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
    """Does a function call one of these? `model.eval()`, which most that train call, is another matter, and
    so is `vars(arguments)`.
    """
    if not READS_ITSELF & set(code.co_names):
        return False
    steps = list(dis.get_instructions(code))
    for step, after in pairwise(steps):
        if step.argval not in READS_ITSELF or (step.argval == "eval" and step.opname not in GLOBALLY):
            continue
        of_another = "NULL" in step.argrepr and after.opname.startswith("LOAD_")  # it is called, with that
        if step.argval not in OF_ANOTHER or not of_another:
            return True
    return False
