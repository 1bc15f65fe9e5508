"""Forks the programs of these tests, and the zygotes of their children, from a process that has made their
imports, and has computed nothing.

Reads requests from standard input, each a line of JSON: ``code`` or None for the command line, ``words``,
``environment``, ``folder``, and files for ``output`` and ``errors``. Answers each with its exit code.
"""

import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from types import ModuleType

import torch._dynamo  # noqa: F401

import vivace.command.cli
import vivace.live.training
import vivace.session.opening  # noqa: F401

ZYGOTE = Path(__file__).parents[1] / "scenes" / "zygote.py"


def serve(request):
    """Be the program."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "output"), (2, "errors")):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    runpy.run_path(str(ZYGOTE))
    sys.path[0] = ""
    sys.argv = [sys.argv[0], *request["words"]]
    if request["code"] is None:
        runpy.run_module("vivace", run_name="__main__")
    else:
        sys.modules["__main__"] = program = ModuleType("__main__")
        exec(compile(request["code"], "program", "exec"), vars(program))


def code_of(request):
    """The exit code of the program, as Python ends."""
    try:
        serve(request)
    except SystemExit as end:
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


for line in sys.stdin:
    child = os.fork()
    if not child:
        code = code_of(json.loads(line))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
