"""Is a file the model? A fresh process without the person's code opens it, and its answers are compared."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy

from vivace.errors import ChildFailed, Code, TimedOut
from vivace.serving.calls import Calls, read_arrays, write_arrays
from vivace.serving.maker import PROOF_SAMPLES

SCRIPT = Path(__file__).with_name("serve.py")
PACKAGES = Path(__file__).resolve().parents[2]
BATCHES = (1, 2, 3, 8, 32)  # sizes in turn, so that a batch that was taken as a constant shows
TIMEOUT = 1200.0

Arrays = list[numpy.ndarray[Any, Any]]


def pieces(calls: Calls) -> list[Arrays]:
    """Calls on the samples of the proof, in batches of many sizes, the person's own among them: what a model
    keeps of its first batch may stand in the file as a constant.

    Where samples differ in length, they stay as they were put together, and their first few come alone too.
    """
    if calls.ragged:
        whole = calls.first(PROOF_SAMPLES)
        some = zip(itertools.cycle(whole), BATCHES[:-1], strict=False)
        return [*whole, *(calls.cut(arrays, 0, size) for arrays, size in some)]
    found, start, turn = [calls.inputs[0]], 0, 0
    total = min(PROOF_SAMPLES, sum(calls.rows))
    while start < total:
        size = min(BATCHES[turn % len(BATCHES)], total - start)
        found.append(calls.sample(size, start))
        start, turn = start + size, turn + 1
    return found


def answers(
    runtime: str,
    file: Path,
    numbers: str,
    threads: int,
    calls: Sequence[Arrays],
    scratch: Path,
    values: Sequence[Sequence[str]] = (),
) -> tuple[list[Arrays], dict[str, Any]]:
    """What a fresh process returns that knows the file and the runtime alone; and versions.

    With `values`, names of values of which each may have several, it returns these values of a copy of the
    file that gives them as outputs, as far as they are there; ``told`` are their places.

    Raises ChildFailed where it cannot open or run the file, TimedOut where it takes too long.
    """
    given, returned = scratch / "given.npz", scratch / "returned.npz"
    write_arrays(given, calls)
    command = [
        sys.executable,
        "-P",  # the script's own folder is no place to import from
        str(SCRIPT),
        runtime,
        str(file),
        numbers,
        str(threads),
        str(given),
        str(returned),
        json.dumps(list(values)),
    ]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES)}
    cannot = f"a fresh process cannot serve '{file.name}' ({runtime}): "
    try:
        done = subprocess.run(
            command,
            cwd=scratch,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        raise TimedOut(f"{cannot}no answer within {TIMEOUT:.0f} s, and it was stopped") from None
    if done.returncode == -signal.SIGKILL:
        raise ChildFailed(f"{cannot}it died from SIGKILL (out of memory?)", code=Code.KILLED)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ChildFailed(f"{cannot}{last[:300]}")
    facts: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return read_arrays(returned), facts
