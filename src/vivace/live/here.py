"""Inside the script's process: begin to watch, once torch has been imported."""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from vivace.live.errand import VARIABLE, Errand

if TYPE_CHECKING:
    from vivace.plan import Plan

_begun = False


def begin() -> None:
    """Watch this process as the launcher asked. Called when torch has been imported."""
    _begin(Errand.loads(os.environ[VARIABLE]))


def run_here(
    plan: Plan | str | os.PathLike[str] | None = None, *, out: str | os.PathLike[str] = "runs/run"
) -> None:
    """Make the training in this process faster, as ``vivace run`` does: for the first line of a script or a
    notebook that cannot be started through the launcher.

    Does nothing under ``vivace run``, or a second time. Args as of `vivace.run`; raises PlanError and
    FolderError.
    """
    if _begun or VARIABLE in os.environ:
        return
    from vivace.live.launch import prepared_folder

    folder, wanted = prepared_folder(Path(out), plan)
    _begin(Errand(str(folder), str(out), shlex.join(["python", *sys.argv]), wanted))


def _begin(errand: Errand) -> None:
    global _begun
    if _begun:
        return
    _begun = True
    begin = time.perf_counter()
    from vivace.live.ending import tell
    from vivace.live.loop import Loop

    loop = Loop(errand, tell=tell)
    loop.install()
    loop.spending.waited += time.perf_counter() - begin
