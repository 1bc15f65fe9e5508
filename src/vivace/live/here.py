"""Inside the script's process: begin to watch, once torch has been imported."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from vivace.live.errand import VARIABLE, Errand

if TYPE_CHECKING:
    from vivace.plan import Plan

_begun = False
_lock: IO[bytes] | None = None  # on the folder, as long as this process lives


def begin() -> None:
    """Watch this process as the launcher asked. Called when torch has been imported."""
    errand = Errand.loads(os.environ[VARIABLE])
    if errand.lock >= 0 and errand.is_for_this_process:
        with contextlib.suppress(OSError):  # which the script has closed
            os.set_inheritable(errand.lock, False)  # what the script starts may outlive it
    if errand.first_tells and not errand.is_for_this_process:
        errand = dataclasses.replace(errand, quiet=True)
    _begin(errand)


def tell_of_others(errand: str, document: dict[str, Any]) -> None:
    """Say what came of a process that this one, which the person started, has started and now ends after."""
    from vivace.live.ending import say
    from vivace.profiling.record.signals import end_as_interrupted

    say(Errand.loads(errand), document)
    end_as_interrupted()


def run_here(
    plan: Plan | str | os.PathLike[str] | None = None, *, out: str | os.PathLike[str] = "runs/run"
) -> None:
    """Make the training in this process faster, as ``vivace run`` does: for the first line of a script or a
    notebook that cannot be started through the launcher.

    Does nothing under ``vivace run``, a second time, or in a process that this one starts, such as a loader's
    worker that is spawned and runs the script's first lines again. Args as of `vivace.run`; raises PlanError,
    and FolderError, also where another run is under way in the folder.
    """
    global _lock
    if _begun or VARIABLE in os.environ:
        return
    from vivace.live.launch import taken_folder

    folder, wanted, earlier, _lock = taken_folder(Path(out), plan)
    command = shlex.join(["python", *sys.orig_argv[1:]])  # sys.argv has lost -m
    errand = Errand(str(folder), str(out), command, wanted, earlier=earlier)
    os.environ[VARIABLE] = errand.dumps()  # keeps out those that are started from here
    _begin(errand)


def _begin(errand: Errand) -> None:
    global _begun
    if _begun:
        return
    _begun = True
    import torch as torch  # by the script that asks in its first line, too: no time of ours

    begin = time.perf_counter()
    from vivace.live.ending import tell
    from vivace.live.loop import Loop

    loop = Loop(errand, tell=tell)
    loop.install()
    loop.spending.waited += time.perf_counter() - begin
