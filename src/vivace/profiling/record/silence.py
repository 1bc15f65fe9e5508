"""What copies of a model say and write while they run again: nobody is to hear of it twice."""

from __future__ import annotations

import builtins
import contextlib
import inspect
import io
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TextIO, cast

from vivace.profiling.record.signals import in_handler

WRITES = set("wax+")  # in the mode of a file
WRITERS = (
    ("torch.utils.tensorboard.writer", "FileWriter", "add_event"),
    ("tensorboardX.writer", "FileWriter", "add_event"),
    ("wandb.sdk.wandb_run", "Run", "_log"),  # wandb.log holds Run.log itself
)


class _Said(io.StringIO):
    """What is printed, but for what other threads and handlers of signals print: that goes where it went."""

    def __init__(self, theirs: TextIO) -> None:
        super().__init__()
        self._is_theirs, self._theirs = _by_others(), theirs

    def write(self, text: str) -> int:
        return self._theirs.write(text) if self._is_theirs() else super().write(text)


def _by_others() -> Callable[[], bool]:
    """Tells whether another thread calls it, or a handler of a signal."""
    thread = threading.get_ident()
    return lambda: threading.get_ident() != thread or in_handler(inspect.currentframe())


@contextlib.contextmanager
def silence() -> Iterator[list[io.StringIO]]:
    """What copies of a model print is kept, what they warn of and log is dropped: the script's own call has
    said it already.
    """
    said, errors = _Said(sys.stdout), _Said(sys.stderr)
    is_theirs, warn = _by_others(), warnings.showwarning
    warnings.showwarning = lambda *_, **__: None  # such as that a copy has no Trainer
    try:
        with contextlib.ExitStack() as stack:
            for owner, name in _logging():
                stack.enter_context(_dropping(owner, name, is_theirs))
            stack.enter_context(contextlib.redirect_stdout(said))
            stack.enter_context(contextlib.redirect_stderr(errors))
            yield [said, errors]
    finally:
        warnings.showwarning = warn


def _logging() -> Iterator[tuple[type, str]]:
    """Classes by which somebody else hears of something, each with the method that tells it."""
    yield logging.Logger, "handle"
    for module, kind, name in WRITERS:
        if module in sys.modules:
            yield getattr(sys.modules[module], kind), name


@contextlib.contextmanager
def _dropping(owner: type, name: str, is_theirs: Callable[[], bool]) -> Iterator[None]:
    method = getattr(owner, name)
    setattr(owner, name, lambda *given, **named: method(*given, **named) if is_theirs() else None)
    try:
        yield
    finally:
        setattr(owner, name, method)


@contextlib.contextmanager
def nothing_written(refusal: Callable[[str], Exception]) -> Iterator[None]:
    """Inside, this thread opens no file to write. Raises ``refusal(message)`` where it would."""
    is_theirs, original, owners = _by_others(), cast("Any", open), (cast("Any", builtins), cast("Any", io))

    def opened(file: object, mode: str = "r", *others: object, **named: object) -> Any:
        if WRITES & set(mode) and not is_theirs():
            raise refusal("its model writes a file while it runs, and a copy of it would write as well")
        return original(file, mode, *others, **named)

    for owner in owners:
        owner.open = opened
    try:
        yield
    finally:
        for owner in owners:
            owner.open = original
