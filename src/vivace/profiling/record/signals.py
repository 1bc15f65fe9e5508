"""What a script's handlers of signals do while our code runs, such as one for preemption, is the script's."""

from __future__ import annotations

import contextlib
import functools
import inspect
import signal
import sys
from itertools import pairwise
from types import CodeType, FrameType


def raised_by_handler(error: BaseException) -> bool:
    """Was it raised by a function of the script's that handles a signal, or did until it was called?"""
    codes, trace = _codes(), error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes or _was_called_for_one(trace.tb_frame):
            return True
        trace = trace.tb_next
    return False


def in_handler(frame: FrameType | None) -> bool:
    """Is a function of the script's that handles a signal running in this frame, or around it?"""
    codes = _codes()
    while frame is not None:
        if frame.f_code in codes:
            return True
        frame = frame.f_back
    return False


def _was_called_for_one(frame: FrameType) -> bool:
    """Was it called as Python calls a handler, with a number and the frame that it interrupts?"""
    code, found = frame.f_code, frame.f_locals
    given = [found.get(name) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & inspect.CO_VARARGS:
        given += found.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount], ())
    kinds = ((type(one), other) for one, other in pairwise(given))  # theirs may raise where it is asked
    return any(issubclass(kind, int) and other is frame.f_back is not None for kind, other in kinds)


def _codes() -> set[CodeType]:
    """Of the functions that handle signals now."""
    return {code for number in signal.valid_signals() if (code := _code(signal.getsignal(number)))}


def _code(handler: object) -> CodeType | None:
    if handler is None or isinstance(handler, int):  # nearly all: no function of Python's
        return None
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not inspect.isroutine(handler):
        handler = type(handler).__call__  # of an object that is called
    function = handler.__func__ if inspect.ismethod(handler) else handler
    return function.__code__ if inspect.isfunction(function) else None


def end_as_interrupted() -> None:
    """Where a Ctrl-C has ended the script, let Python end by that signal, as alone.

    It forgets that at its end as soon as anything runs code from a string, as dataclasses do when a module is
    imported, and remembers it where such code is interrupted.
    """
    if isinstance(vars(sys).get("last_value"), KeyboardInterrupt) and not hasattr(sys, "ps1"):
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")
