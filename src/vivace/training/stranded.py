"""What a rank does when an exchange with the others breaks: say why, and keep what was trained."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vivace.errors import FolderError, RankLost
from vivace.training.rank_watch import WHY_SECONDS, RankWatch
from vivace.training.ranks import Ranks
from vivace.training.verdict import Verdict

ELECTION_SECONDS = 5.0
LATE_SECONDS = 20.0  # for the answer of a rank that lives: its machine may be busy
KEEPING_SECONDS = 60.0


def leave(ranks: Ranks, step: int, lost: str, save: Callable[[], Path | None]) -> RankLost:
    """Let one of the ranks that are left keep the state after `step` steps; returns what to raise.

    Args:
        lost: why the state of this rank is no more that after `step` steps; empty where it is.
        save: writes a checkpoint of this rank's state alone, or returns None where there is nothing to keep.
    """
    watch = ranks.watch
    verdict = watch.why(WHY_SECONDS) if watch is not None else Verdict((), "another rank is gone")
    if watch is not None:
        watch.post(f"stood/{ranks.rank}", json.dumps([step, not lost]))
    left = _those_left(ranks, verdict)
    right = {rank: at for rank, (at, is_right) in left.items() if is_right}
    furthest = max(right.values(), default=-1)
    writer = next((rank for rank in sorted(right) if right[rank] == furthest), None)
    kept = ""
    if writer == ranks.rank:
        try:
            path = save()
            kept = f"{path.name} in '{path.parent}' was kept: go on with --resume" if path is not None else ""
        except FolderError as error:
            kept = f"{error}"
        if watch is not None:
            watch.post("kept", kept or "nothing")
            watch.end_stopped(verdict.ranks)
    elif writer is not None and watch is not None:
        deadline = time.monotonic() + KEEPING_SECONDS
        while not (kept := watch.read("kept")) and time.monotonic() < deadline:
            time.sleep(0.1)
    elif watch is not None:
        watch.post("kept", "nothing")
    if watch is not None:
        watch.post(f"heard/{ranks.rank}", "all")
        if ranks.rank == 0:
            _let_others_hear(watch, set(range(1, ranks.world_size)) - set(verdict.ranks))
    rest = kept if kept and kept != "nothing" else "go on from the last checkpoint with --resume"
    return RankLost(f"{verdict.sentence}: training stopped; {rest}", interrupted_by=verdict.signal)


def _let_others_hear(watch: RankWatch, others: set[int]) -> None:
    """Wait until the others know what was kept: without torchrun they hear it through rank 0's own store."""
    begin = time.monotonic()
    while any(not watch.read(f"heard/{other}") and _is_awaited(watch, other, begin) for other in others):
        time.sleep(0.05)


def _is_awaited(watch: RankWatch, rank: int, begin: float) -> bool:
    """May a rank that has not answered since `begin` still do so?"""
    seconds = LATE_SECONDS if watch.lives(rank) else ELECTION_SECONDS
    return time.monotonic() < begin + seconds


def _those_left(ranks: Ranks, verdict: Verdict) -> dict[int, Any]:
    """The ranks that stand before the same question, each with its step and whether its state is right."""
    watch = ranks.watch
    if watch is None:
        return {}
    found: dict[int, Any] = {}
    if not watch.read(f"stood/{ranks.rank}"):  # the store is out of reach, and with it the others
        return found
    expected = set(range(ranks.world_size)) - set(verdict.ranks)
    begin = time.monotonic()
    while missing := {one for one in expected - set(found) if _is_awaited(watch, one, begin)}:
        for rank in missing:
            if text := watch.read(f"stood/{rank}"):
                found[rank] = json.loads(text)
        time.sleep(0.05)
    return found
