"""What watches a person's training must not fail into it: one guard around all that runs in their calls."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch

from vivace.profiling.record.signals import raised_by_handler

T = TypeVar("T")

_PACKAGE = str(Path(__file__).parents[2]) + os.sep


class Guard:
    """Lets a part of the profile watch for as long as it makes no fault.

    Its first fault switches the part `off` and is told to `on_fault`; the person's call goes on as if nobody
    had watched. What the person's own functions raise is theirs, and is passed on; also what a signal's
    handler of theirs raises in the middle of a watch.
    """

    def __init__(self, on_fault: Callable[[Exception], None]) -> None:
        self._on_fault = on_fault
        self.off = False

    def fail(self, error: Exception) -> None:
        """Switch the part off because of this error, and tell it once."""
        if not self.off:
            self.off = True
            with contextlib.suppress(Exception):
                self._on_fault(error)

    def looking(self, look: Callable[..., object]) -> Callable[..., None]:
        """A hook that only looks: it returns None, and raises nothing of its own."""
        answer = self.answering(look)

        def hook(*arguments: object, **keywords: object) -> None:
            if not torch.compiler.is_compiling():
                answer(*arguments, **keywords)

        return hook

    def answering(self, look: Callable[..., Any]) -> Callable[..., Any]:
        """A hook that raises nothing of its own: it returns what `look` does, or None."""

        def hook(*arguments: object, **keywords: object) -> Any:
            if torch.compiler.is_compiling() or self.off:  # it would be compiled with what it watches
                return None
            try:
                return look(*arguments, **keywords)
            except Exception as error:
                if raised_by_handler(error):
                    raise
                self.fail(error)
                return None

        return hook

    def around(self, original: Callable[..., Any], make: Callable[[Any], Any]) -> Callable[..., Any]:
        """A function to stand in place of `original`: ``make(original)``, made for each call.

        Where that fails of itself, `original` is called as it would have been, if it was not yet.
        """

        def call(*arguments: object, **keywords: object) -> Any:
            if torch.compiler.is_compiling() or self.off:  # a watch inside of compiled code would be compiled
                return original(*arguments, **keywords)
            theirs = _Call(original)
            try:
                return make(theirs)(*arguments, **keywords)
            except Exception as error:
                if error is theirs.error:
                    theirs.error = None  # it holds this frame in turn
                    raise
                if raised_by_handler(error):
                    raise
                self.fail(error)
            if theirs.error is not None:
                raise theirs.error
            return theirs.result if theirs.is_done else original(*arguments, **keywords)

        return call


def reading(look: Callable[[], T], otherwise: T, note: Callable[[Exception], None]) -> T:
    """What `look` returns, or `otherwise` where it cannot: that is told to `note`, and costs nothing else."""
    try:
        return look()
    except Exception as error:
        if raised_by_handler(error):
            raise
        note(error)
        return otherwise


def described(error: Exception) -> str:
    """A fault as a record's ``problems`` hold it: the end of its traceback."""
    return "".join(traceback.format_exception(error))[-2000:]


def hide_frames(error: BaseException) -> None:
    """Cut what stands around the person's calls out of an error's traceback, and of those it came from."""
    left, seen = [error], set[int]()
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = _without_ours(one.__traceback__)
        left += filter(None, (one.__cause__, one.__context__))
        left += one.exceptions if isinstance(one, BaseExceptionGroup) else ()


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    """Ours begin in this file, and go on to the next frame that is none of Vivace's."""
    kept: list[TracebackType] = []
    ours = False
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        ours = file == __file__ or (ours and file.startswith(_PACKAGE))
        if not ours:
            kept.append(trace)
        trace = trace.tb_next
    for one, following in pairwise([*kept, None]):
        assert one is not None
        one.tb_next = following
    return kept[0] if kept else None


class _Call:
    """The person's function, to be called once, and what came of it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.is_done = False
        self.result: Any = None
        self.error: BaseException | None = None

    def __call__(self, *arguments: object, **keywords: object) -> Any:
        try:
            self.result = self.function(*arguments, **keywords)
        except BaseException as error:
            self.error = error
            raise
        self.is_done = True
        return self.result
