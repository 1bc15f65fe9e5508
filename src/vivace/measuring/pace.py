"""How long compiling takes, and how fast this machine compiles: what earlier tunings of any job saw here,
against what had been foretold.

Kept in the user's cache folder, a line for each tuning in which something compiled; it may be deleted.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterable

from vivace.errors import FolderError
from vivace.inspection.store import cache_folder
from vivace.ledger import Code, Ledger, Trial
from vivace.plan import Plan

COMPILING_SECONDS = 20.0  # of a warm-up that was never seen, where the step's operators are not known
# Of compiling for a CPU: to trace, and of one core for each operator of other shapes that may be a kernel.
# Fitted to first warm-ups of six jobs on two cores, of 6 to 110 s; at most 5 s off.
TRACING_SECONDS, KERNEL_SECONDS = 6.0, 1.4
NUM_KEPT = 9  # the last ones: what else a machine does changes
MOST = 20.0  # times as long as foretold, or as short: more is a fault, not a pace
BUSY = 0.2  # of the processor, used by others: what took long then says nothing of the machine


def compiling_seconds(operators: int, cores: int) -> float:
    """About how long a model takes to compile of which a step runs so many distinct operators."""
    if not operators:
        return COMPILING_SECONDS
    return TRACING_SECONDS + KERNEL_SECONDS * operators / min(cores, operators)


def compiling_pace(fingerprint: str) -> float:
    """How many times as long as `compiling_seconds` says compiling takes on a machine.

    It counts like one more tuning that saw 1: a single one that went wrong does not rule compiling out.
    """
    documents = []
    with contextlib.suppress(FolderError, OSError):
        documents = _ledger(fingerprint).read("compiling")
    shares = [document.get("share") for document in documents]
    known = [share for share in shares if isinstance(share, float) and 1 / MOST <= share <= MOST]
    return statistics.median([1.0, *known[-NUM_KEPT:]])


def learn_pace(fingerprint: str, foretold_seconds: float, trials: Iterable[Trial]) -> None:
    """Keep what compiling took in the first of a tuning's trials that compiled: until then nothing was
    compiled. One that was stopped took at least what it had been given.

    `foretold_seconds` is what `compiling_seconds` says, without the machine's pace.
    """
    for trial in trials:
        if not Plan.from_dict(trial.techniques).compiles or trial.status == "refused":
            continue
        stopped = max(trial.seconds, foretold_seconds) if trial.code == Code.TIMED_OUT else None
        seconds = stopped if trial.warmup_seconds is None else trial.warmup_seconds
        if seconds is not None and trial.foreign_share <= BUSY:
            ledger = _ledger(fingerprint)
            with contextlib.suppress(FolderError, OSError):
                ledger.path.parent.mkdir(parents=True, exist_ok=True)
                ledger.append("compiling", {"share": float(seconds / foretold_seconds)})
        return


def _ledger(fingerprint: str) -> Ledger:
    return Ledger(cache_folder() / "compiling" / f"{fingerprint}.jsonl")
