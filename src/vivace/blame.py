"""What failed in a person's code, in one sentence: their own line, and the file that it read."""

from __future__ import annotations

import inspect
import os
import re
import sysconfig
import traceback
from pathlib import Path

# What torch puts before an exception of a DataLoader's worker, and the parts of the traceback inside.
_FROM_WORKER = re.compile(r"Caught \w+ in .*worker process \d+\.\nOriginal Traceback")
_FRAMES = re.compile(r'^  File "(.+)", line (\d+), in .*\n    (.*)$', re.MULTILINE)


def blame(error: BaseException, known: str = "") -> str:
    """``ValueError: text (file.py, line 7: source)`` of the deepest frame outside of Vivace and libraries,
    and the file that it handed over, unless it is `known`. Of an exception that crossed from a DataLoader's
    worker, what it was there.
    """
    text, frames = str(error).strip(), list(traceback.extract_tb(error.__traceback__))
    if _FROM_WORKER.match(text):
        frames = [traceback.FrameSummary(f, int(n), "", line=s) for f, n, s in _FRAMES.findall(text)]
        text = text.rpartition(f"\n{type(error).__name__}: ")[2] or text.splitlines()[-1]
    theirs = [frame for frame in frames if _is_theirs(frame.filename)]
    where = ""
    if theirs and "importlib" not in theirs[-1].filename:
        file = file_of(error)
        named = f"file '{file}'; " if file != known and file not in text else ""
        where = f" ({named}{theirs[-1].filename}, line {theirs[-1].lineno}: {theirs[-1].line})"
    text, *more = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    if more and (text.endswith(":") or more[0].startswith("- ")):  # it announces what comes, or a list
        text = f"{text} {more[0]}"
    if isinstance(error, EOFError) and text == "EOF when reading a line":
        text = "standard input is closed while Vivace runs a job; the job must not read it"
    return f"{type(error).__name__}: {text}{where}" if text else f"{type(error).__name__}{where}"


def file_of(error: BaseException) -> str:
    """The file that the person's line gave to what failed: ``path`` of `numpy.load(path)`; else empty."""
    calls = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    theirs = [number for number, frame in enumerate(calls, 1) if _is_theirs(frame.f_code.co_filename)]
    for frame in calls[max(theirs, default=0) :]:
        for value in map(frame.f_locals.get, inspect.getargvalues(frame).args):
            if isinstance(value, (str, os.PathLike)) and os.path.isfile(value):
                return os.fspath(value)
    return ""


def _is_theirs(file: str) -> bool:
    others = ("<", str(Path(__file__).resolve().parent), sysconfig.get_path("stdlib"))
    return not file.startswith(others) and "site-packages" not in file
