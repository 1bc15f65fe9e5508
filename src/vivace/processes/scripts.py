"""A person's script in a process of its own, with hooks of ours in it: what `profile` and `run` share."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from vivace.errors import InputError

INJECTED = (
    Path(__file__).parent / "inject"
)  # its `sitecustomize` stands before the person's, and runs that first
ENDING_SECONDS = 10.0
PYTHON = re.compile(r"(python|pypy)[\d.]*")
OPTIONS = re.compile(r"-(?=.)([A-Za-z?]*?)([cmWX].*)?", re.DOTALL)  # a word of them; one may take a value
HANDED_ON = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")  # which ask for an end, or for a checkpoint


def resolved(command: Sequence[str]) -> list[str]:
    """The command as it is run. ``python`` is the one that the person's shell would find, which need not be
    Vivace's; where there is none, it is Vivace's, and that is said.

    Raises InputError where there is no such program, and where Python is told to pass over our hooks.
    """
    program, *arguments = command
    if PYTHON.fullmatch(Path(program).name) and (option := _shuts_out(arguments)):
        raise InputError(
            f"'{program} {option}' keeps Vivace out of the script, which it enters by PYTHONPATH and a "
            f"sitecustomize: leave {option} out"
        )
    if shutil.which(program) is not None:
        return [program, *arguments]
    if program == "python":
        print(f"vivace: no 'python' is on the PATH; {sys.executable} runs the script", file=sys.stderr)
        return [sys.executable, *arguments]
    if program.endswith(".py") and Path(program).is_file():
        if has_torchrun_started():  # which, too, takes the script alone
            return [sys.executable, program, *arguments]
        raise InputError(f"'{program}' needs its interpreter: -- {shlex.join(['python', *command])}")
    if Path(program).is_file():
        raise InputError(f"'{program}' cannot be run: it is not executable")
    raise InputError(f"there is no program '{program}' to run")


def _shuts_out(arguments: Sequence[str]) -> str:
    """The option of Python's own by which it reads no PYTHONPATH (-E, -I) or no sitecustomize (-I, -S)."""
    words = iter(arguments)
    for word in words:
        found = OPTIONS.fullmatch(word)
        if found is None:
            break
        flags, valued = found[1], found[2] or ""
        if shut := [letter for letter in flags if letter in "EIS"]:
            return f"-{shut[0]}"
        if valued[:1] in ("c", "m"):  # what follows is the script's
            break
        if valued in ("W", "X"):
            next(words, None)
    return ""


def has_torchrun_started() -> bool:
    """Is this one of the processes that torchrun has started?"""
    return "TORCHELASTIC_RUN_ID" in os.environ


def injected(**variables: str) -> dict[str, str]:
    """The environment with the hooks in it; `variables` say which, and what they need to know."""
    before = os.environ.get("PYTHONPATH")
    path = str(INJECTED) + (os.pathsep + before if before else "")
    kept = {name: value for name, value in os.environ.items() if name not in ("VIVACE_PROFILE", "VIVACE_RUN")}
    return {**kept, "PYTHONPATH": path, **variables}


@contextlib.contextmanager
def starting(program: str) -> Iterator[None]:
    """Raises InputError where what is started inside cannot be."""
    try:
        yield
    except OSError as error:
        raise InputError(f"'{program}' cannot be run: {error.strerror}") from None


@contextlib.contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A script that runs; `options` are those of `subprocess.Popen`. Inside, signals `HANDED_ON` go to it,
    which would go on alone, and to who has taken them before. What is ignored, as under nohup, stays so; of
    one that is sent to all of a process group the script hears twice.

    Raises InputError where it cannot be started.
    """
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def hand_on(number: int, frame: FrameType | None) -> None:
        (early.append if process is None else process.send_signal)(number)
        answer = before[number]
        if callable(answer):
            answer(number, frame)

    before = {}
    if threading.current_thread() is threading.main_thread():  # elsewhere nobody may handle signals
        numbers = [getattr(signal, name) for name in HANDED_ON if hasattr(signal, name)]
        before = {number: signal.getsignal(number) for number in numbers}
    taken = [number for number, answer in before.items() if answer not in (signal.SIG_IGN, None)]
    try:
        for number in taken:
            signal.signal(number, hand_on)
        with starting(command[0]):
            process = subprocess.Popen(command, **options)
        for number in early:
            process.send_signal(number)
        yield process
    finally:
        for number in taken:
            signal.signal(number, before[number])


def end(process: subprocess.Popen[bytes]) -> int:
    """Wait for a script that a terminal interrupted with us; interrupt it where nobody did, then end it.

    Returns its exit code, as `subprocess` counts.
    """
    for signal_sent in (None, signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if signal_sent is not None:
            process.send_signal(signal_sent)
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            return process.wait(ENDING_SECONDS)
    return process.wait()


def exit_code(code: int) -> int:
    """As a shell tells it: 128 and the number of the signal that ended it."""
    return code if code >= 0 else 128 - code
