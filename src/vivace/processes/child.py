"""The child's side of `vivace.processes.launch`: loads the job, then answers commands."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import pickle
import sys
import time
import traceback
from typing import Any, TextIO

from vivace import job as jobs
from vivace.processes.launch import own_error, unpacked

_parent: tuple[TextIO, TextIO] | None = None
_limit = math.inf
_begun = 0.0, 0.0


def ask_parent(question: object) -> Any:
    """In the middle of a command: what the parent answers to a question; both are JSON types.

    See `Child.ask` for its side. Ends this process where the parent is gone.
    """
    assert _parent is not None, "only a child process has a parent to ask"
    commands, answers = _parent
    answers.write(json.dumps({"question": question}) + "\n")
    answers.flush()
    line = commands.readline()
    if not line:
        os._exit(1)
    return json.loads(line)


def limit() -> float:
    """When the parent gives the present command up, on `time.monotonic`; never outside of a child process."""
    return _limit


def begun_after() -> tuple[float, float]:
    """Processor seconds in which torch was imported for this process, before it began, and seconds in which
    it loaded the job: a process of its own takes as long.
    """
    return _begun


def serve(payload: int, read: int, write: int, imported: float) -> None:
    """Load the job of the open file `payload`, then answer commands until the parent closes its end.

    `imported` are the processor seconds in which torch was imported.
    """
    global _parent, _limit, _begun
    begin = time.monotonic()
    commands, answers = os.fdopen(read, "r"), os.fdopen(write, "w")
    _parent = commands, answers
    handler, problem = None, None
    try:
        with open(payload, "rb") as file:
            head = pickle.load(file)  # written by our own parent, into a file without a name
        sys.path[:] = head["sys_path"]
        os.chdir(head["folder"])
        os.environ.clear()
        os.environ.update(head["environment"])
        handler = _begin(head)
    except BaseException as error:
        problem = _describe(error)
    _begun = imported, time.monotonic() - begin
    for line in commands:
        message = json.loads(line)
        _limit = time.monotonic() + message["seconds"]
        answer: dict[str, Any]
        try:
            if problem is not None:
                answer = {"error": problem}
            else:
                answer = {"answer": getattr(handler, message["command"])(**message["arguments"])}
        except BaseException as error:
            answer = {"error": _describe(error)}
        with contextlib.suppress(BrokenPipeError):
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


def _begin(head: dict[str, Any]) -> Any:
    job = unpacked(head["body"])
    if isinstance(job, str):
        job = jobs.load(job)
    module, _, name = head["entry"].partition(":")
    return getattr(importlib.import_module(module), name)(job, **head["arguments"])


def _describe(error: BaseException) -> dict[str, Any]:
    traceback.print_exception(error)
    return own_error(error).to_dict()
