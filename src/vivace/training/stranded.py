"""What a rank does when an exchange with the others breaks: say why, and keep what was trained."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vivace.errors import CheckpointError, FolderError, RankLost
from vivace.training.meeting import torchrun_keeps_the_store
from vivace.training.rank_watch import WHY_SECONDS, RankWatch
from vivace.training.ranks import Ranks
from vivace.training.verdict import Verdict

ELECTION_SECONDS = 5.0  # for a rank that gives no sign of life
LATE_SECONDS = 20.0  # for one that lives, where this one can keep what was trained, too


def leave(ranks: Ranks, step: int, lost: str, save: Callable[[], Path | None]) -> RankLost:
    """Let one of the ranks that are left keep the state after `step` steps; returns what to raise.

    Args:
        lost: why the state of this rank is no more that after `step` steps; empty where it is.
        save: writes a checkpoint of this rank's state alone, or returns None where there is nothing to keep.
    """
    watch = ranks.watch
    if watch is None:
        return _told(Verdict((), "another rank is gone"), "")
    verdict = watch.why(WHY_SECONDS)
    watch.post(f"stood/{ranks.rank}", json.dumps([step, not lost]))
    patience = watch.patience if lost else LATE_SECONDS
    given_up = set(verdict.ranks) - {ranks.rank}
    left = _those_left(watch, set(range(watch.world_size)) - given_up, patience)
    if not any(is_right for _, is_right in left.values()):  # one given up may come back
        left |= _those_left(watch, set(filter(watch.lives, given_up)), LATE_SECONDS)
    right = {rank: at for rank, (at, is_right) in left.items() if is_right}
    furthest = max(right.values(), default=-1)
    writer = next((rank for rank in sorted(right) if right[rank] == furthest), None)
    if writer == ranks.rank:  # unless another one, which has waited for this one in vain, writes already
        writer = watch.claim(f"writer/{furthest}")
    kept = ""
    if writer == ranks.rank:
        try:
            path = save()
            kept = f"{path.name} in '{path.parent}' was kept: go on with --resume" if path is not None else ""
        except (CheckpointError, FolderError) as error:
            kept = f"{error}"
        watch.post("kept", kept or "nothing")
        watch.end_stopped(verdict.ranks)
    elif writer is not None:
        while not (kept := watch.read("kept")) and watch.lives(writer):
            time.sleep(0.1)
        kept = kept or watch.read("kept")  # it may have ended right after
    else:
        watch.post("kept", "nothing")
    watch.post(f"heard/{ranks.rank}", "all")
    if ranks.rank == 0 and not torchrun_keeps_the_store():
        _let_others_hear(watch, set(verdict.ranks))
    return _told(verdict, kept)


def _told(verdict: Verdict, kept: str) -> RankLost:
    rest = kept if kept and kept != "nothing" else "go on from the last checkpoint with --resume"
    return RankLost(f"{verdict.sentence}: training stopped; {rest}", interrupted_by=verdict.signal)


def _let_others_hear(watch: RankWatch, given_up: set[int]) -> None:
    """Wait until the others know what was kept: they hear it through the store of this rank's own."""
    begin, deaf = time.monotonic(), set(range(1, watch.world_size)) - given_up
    while deaf := {one for one in deaf if not watch.read(f"heard/{one}")}:
        if not any(_is_awaited(watch, one, begin, watch.patience) for one in deaf):
            return
        time.sleep(0.05)


def _is_awaited(watch: RankWatch, rank: int, begin: float, patience: float) -> bool:
    """May a rank that has not answered since `begin` still do so? One that lives, for `patience` seconds."""
    return time.monotonic() < begin + (patience if watch.lives(rank) else ELECTION_SECONDS)


def _those_left(watch: RankWatch, expected: set[int], patience: float) -> dict[int, Any]:
    """Of these ranks those that stand before the same question, with step and whether its state is right."""
    found: dict[int, Any] = {}
    if not watch.read(f"stood/{watch.rank}"):  # the store is out of reach, and with it the others
        return found
    begin = time.monotonic()
    while missing := {one for one in expected - set(found) if _is_awaited(watch, one, begin, patience)}:
        for rank in missing:
            if text := watch.read(f"stood/{rank}"):
                found[rank] = json.loads(text)
        time.sleep(0.05)
    return found
