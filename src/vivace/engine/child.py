"""The child's side of `vivace.engine.launch`: ``python -m vivace.engine.child PAYLOAD READ WRITE PARENT``."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import pickle
import signal
import sys
import traceback
from typing import Any


def main(payload: str, read: int, write: int, parent: int) -> None:
    """Load the job, then answer commands until the parent closes its end."""
    _die_with(parent)
    commands, answers = os.fdopen(read, "r"), os.fdopen(write, "w")
    handler = None
    try:
        with open(payload, "rb") as file:
            head = pickle.load(file)  # written by our own parent, in a file that only this user can write
        sys.path[:] = head["sys_path"]
        handler = _begin(head)
        problem = None
    except BaseException as error:
        problem = _describe(error)
    for line in commands:
        message = json.loads(line)
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
    from vivace import job as jobs
    from vivace import registry

    job, classes = pickle.loads(head["body"])
    for cls in classes:
        registry.register(cls)
    if isinstance(job, str):
        job = jobs.load(job)
    module, _, name = head["entry"].partition(":")
    return getattr(importlib.import_module(module), name)(job, **head["arguments"])


def _describe(error: BaseException) -> dict[str, str]:
    from vivace.engine.launch import describe

    traceback.print_exception(error)
    return describe(error)


def _die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
