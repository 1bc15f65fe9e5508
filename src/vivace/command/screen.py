"""Where a command shows things, and how every error becomes one sentence and an exit code."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TextIO

import typer

from vivace.errors import InputError, RankLost, TechniqueWarning, VivaceError, printable
from vivace.files import finite
from vivace.training.stopping import tells_first

_show_warning = warnings.showwarning


class Screen:
    """Where a command shows things: standard error; the real standard output is kept for the document."""

    def __init__(self, as_json: bool, quiet: bool) -> None:
        self.as_json, self.quiet = as_json, quiet
        self.exit_code = 0
        self.script_input: int | None = None  # where a person's script reads: the real standard input
        with contextlib.suppress(OSError):  # it may be closed
            self.script_input = os.dup(0)
        warnings.showwarning = self._warn  # type: ignore[assignment]
        for number in (1, 2):
            _stand_in(number)
        # A file's name may be no text: in JSON the parts of it that are none are told by their numbers.
        self._output = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="backslashreplace")
        os.dup2(2, 1)  # what a job prints goes to standard error

    @property
    def script_output(self) -> int | None:
        """Where a person's script writes: the real standard output, unless the document goes there."""
        return None if self.as_json else self._output.fileno()

    def give_back(self) -> None:
        """Standard input and output are the real ones again, for a program that takes this one's place."""
        os.dup2(self._output.fileno(), 1)
        if self.script_input is not None:
            os.dup2(self.script_input, 0)

    def document(self, content: dict[str, Any]) -> None:
        """Print the command's JSON document, if it was asked for."""
        if self.as_json:
            self._write(json.dumps(finite(content), ensure_ascii=False, default=str) + "\n")

    def text(self, content: str) -> None:
        """Print what was asked for as a text, to be piped into a file, unless a document was asked for."""
        if not self.as_json:
            self._write(content)

    def _write(self, content: str) -> None:
        try:
            self._output.write(content)
            self._output.flush()
        except OSError as error:  # a full disk, or a pipe that nobody reads any more
            self.as_json = False
            with contextlib.suppress(OSError):
                self._output.close()
            raise InputError(f"standard output cannot be written: {error.strerror}") from None

    def fail(self, kind: str, message: str) -> None:
        """The error's document, where documents are asked for, and its sentence."""
        with contextlib.suppress(InputError):  # where standard output cannot be written, the sentence is left
            self.document({"error": {"kind": kind, "message": message}})
        text = f"vivace: {printable(message)}"
        if sys.stderr.isatty():  # between words; elsewhere it stays one line
            width = shutil.get_terminal_size().columns
            text = textwrap.fill(text, width, break_on_hyphens=False, break_long_words=False)
        _print(text)

    def _warn(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        """Vivace's own warnings as one sentence; all others as ever."""
        if issubclass(category, TechniqueWarning):
            self.say(f"vivace: {message}")
        else:
            _show_warning(message, category, filename, lineno, file, line)

    def show(self, draw: Callable[[Any], None]) -> None:
        """Let `draw` print tables on a console, unless quiet."""
        if not self.quiet:
            from vivace.command.console import Lasting

            draw(Lasting(stderr=True, highlight=False))

    def say(self, text: str) -> None:
        """One line on standard error, unless quiet; it may begin with an empty one."""
        if not self.quiet:
            _print("\n".join(map(printable, text.split("\n"))))


def _print(text: str) -> None:
    """On standard error, where somebody still reads it and its disk is not full."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _stand_in(number: int) -> None:
    """Where standard output or error is closed, what goes there is lost, as the person wants it."""
    try:
        os.fstat(number)
    except OSError:
        nothing = os.open(os.devnull, os.O_WRONLY)
        if nothing != number:
            os.dup2(nothing, number)
            os.close(nothing)
    name = ("stdout", "stderr")[number - 1]
    if getattr(sys, name) is None:
        setattr(sys, name, os.fdopen(number, "w", closefd=False))
    getattr(sys, name).flush()


@contextmanager
def _no_silent_end(shown: Screen) -> Iterator[None]:
    """While entered, a job that ends this process by ``os._exit(0)``, after which no more Python runs, does
    not end it as if the command were done.
    """
    leave, own = os._exit, os.getpid()

    def told(status: int) -> NoReturn:
        if status == 0 and os.getpid() == own:  # a fork ends so as it should
            shown.fail(
                "JobError",
                "the job ended the process by os._exit(0) before the command was done: let its functions "
                "return, or raise an error",
            )
            status = 2
        leave(status)

    os._exit = told
    try:
        yield
    finally:
        os._exit = leave


@contextmanager
def screen(
    as_json: bool,
    quiet: bool,
    debug: bool,
    device: str | None = None,
    *,
    one_speaks: bool = False,
    forks: bool = False,
) -> Iterator[Screen]:
    """Run a command's body on the named device; every error becomes one sentence and an exit code.

    Where `one_speaks`, of several ranks only rank 0 does, and its exit code is the command's: the others end
    with 0, for torchrun ends all where one does otherwise. One that has lost the others says so. Where it
    `forks` children, these get their imports while the command has its own.
    """
    follows = one_speaks and os.environ.get("RANK", "0") != "0"
    current = Screen(as_json and not follows, quiet or follows)
    in_launch = contextlib.ExitStack()
    try:
        if "RANK" in os.environ:
            in_launch.enter_context(tells_first())
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)  # a job must not wait for the terminal
        if device is not None:
            from vivace.inspection.device_choice import train_on

            train_on(device)
        if forks:
            from vivace.processes.launch import begin

            begin()
        with _no_silent_end(current):
            yield current
        code = current.exit_code if not follows else 0
    except VivaceError as error:
        if debug:
            raise
        told = not follows or isinstance(error, RankLost)
        if told:
            current.fail(error.kind, str(error))
        code = error.exit_code if told else 0
    except KeyboardInterrupt:
        if not follows:
            current.fail("KeyboardInterrupt", "interrupted")
        code = 130
    except BaseException as error:  # SystemExit too: a job that calls exit() must not end with its code
        if debug:
            raise
        current.fail(
            "InternalError",
            f"a fault of Vivace's own, {type(error).__name__}: {error}; --debug shows where",
        )
        code = 2
    finally:
        in_launch.close()
    if code:
        raise typer.Exit(code)
