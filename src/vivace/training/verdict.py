"""Which rank the others wait for, judged from what each says of itself."""

from __future__ import annotations

import dataclasses
import socket
from typing import Any

import psutil

from vivace.words import duration

SILENT_SECONDS = 8.0  # without a beat: the process is stopped, dead, or cut off
WARN_SECONDS = 30.0
STOP_SECONDS = 8.0  # after a request to stop, of the 30 that torchrun gives; or where waiting is in vain
BUSY_TIMES = 12  # times the patience, for a rank whose process computes
BUSY_SHARE = 0.02  # of a core; a process that uses less does not compute
DATA_ENDED = "the end of its data"


@dataclasses.dataclass(frozen=True)
class Seen:
    """What is known of one rank: its last beat, how old that is, and for how long it has not gone on.

    `idle_seconds` is how long it has neither gone on nor worked.
    """

    rank: int
    beat: dict[str, Any]
    silent_seconds: float = 0.0
    still_seconds: float = 0.0
    idle_seconds: float = 0.0

    @property
    def silent(self) -> bool:
        """Has no beat come for so long that the process cannot be running, or cannot be reached?"""
        return self.silent_seconds >= SILENT_SECONDS

    @property
    def busy(self) -> bool:
        """Does it compute, though it does not go on?"""
        return self.idle_seconds < self.still_seconds / 2


class Sight:
    """Follows the beats of one rank, by the clock of the one who looks."""

    def __init__(self, rank: int, now: float) -> None:
        self.rank = rank
        self._number, self._heard_at = -1, now
        self._place: Any = None
        self._still_since = self._idle_since = self._work_at = now
        self._work = 0.0

    def see(self, beat: dict[str, Any], now: float) -> Seen:
        """The rank, whose last beat this is."""
        if beat["number"] != self._number:
            self._number, self._heard_at = beat["number"], now
            worked, seconds = beat["work"] - self._work, now - self._work_at
            if worked > BUSY_SHARE * seconds:
                self._idle_since = now
            self._work, self._work_at = beat["work"], now
        place = (beat["at"], beat["changes"])
        if place != self._place:
            self._place, self._still_since, self._idle_since = place, now, now
        return Seen(self.rank, beat, now - self._heard_at, now - self._still_since, now - self._idle_since)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Which ranks the others wait for, in one sentence; `signal` names a request to stop that came first."""

    ranks: tuple[int, ...]
    sentence: str
    signal: str = ""


def judge(seen: list[Seen], patience: float) -> tuple[Verdict | None, bool]:
    """Who holds up the ranks, where none of them goes on; and whether it is time to give up waiting.

    A rank that gives no sign of life is lost; else it is the one that is furthest behind, in steps, in
    agreements and in exchanges of gradients. Where all wait in the same exchange, it is the link.
    """
    still = min(one.still_seconds for one in seen)
    asked = next((one.beat["asked"] for one in seen if one.beat["asked"]), "")
    behind = [one for one in seen if one.silent] or _furthest_behind(seen)
    busy = any(one.busy and not one.silent for one in behind or seen)
    in_vain = 0 < len(behind) < len(seen) and all(_has_ended(one) for one in behind)
    limit = patience * BUSY_TIMES if busy else patience
    if in_vain or asked:
        limit = min(limit, STOP_SECONDS)
    warned = patience if busy else WARN_SECONDS
    if still < min(limit, warned):
        return None, False
    return Verdict(tuple(one.rank for one in behind), _sentence(seen, behind, still), asked), still >= limit


def _furthest_behind(seen: list[Seen]) -> list[Seen]:
    """None where all are equally far."""
    least = min(one.beat["at"] for one in seen)
    behind = [one for one in seen if one.beat["at"] == least]
    return behind if len(behind) < len(seen) else []


def _has_ended(one: Seen) -> bool:
    return not one.silent and str(one.beat["what"]).startswith(DATA_ENDED)


def _sentence(seen: list[Seen], behind: list[Seen], still: float) -> str:
    if not behind:
        what, where = seen[0].beat["what"], seen[0].beat["where"]
        return (
            f"all ranks have been at {what} for {duration(still)}, rank 0 at {where}, and none works: the "
            "link between them is down, or all wait for something else"
        )
    first = behind[0]
    beat, place = first.beat, f"rank {first.rank} (process {first.beat['pid']} on {first.beat['host']})"
    waiting = [one.rank for one in seen if one not in behind]
    who = f"; rank {waiting[0]} waits for it" if waiting else ""
    if first.silent:
        since = duration(first.silent_seconds)
        text = f"{place} has given no sign of life for {since} (last seen at {beat['what']})"
        return f"{text}: {state_of(beat)}{who}"
    if _has_ended(first) and waiting:
        return (
            f"rank {first.rank} has come to {beat['what']}, and rank {waiting[0]} trains on: give every rank "
            "data of one length"
        )
    does = "works" if first.busy else "stands still"
    return f"{place} has been at {beat['what']} for {duration(still)} and {does} at {beat['where']}{who}"


def state_of(beat: dict[str, Any]) -> str:
    """What the kernel says of the process of a beat, where that is on this machine."""
    if beat["host"] != socket.gethostname():
        return "it is stopped, has died, or its machine or link is gone"
    if has_died(beat):
        return "it has died"
    return "it is stopped (SIGSTOP)" if is_stopped(beat) else "its process lives, and is cut off"


def is_stopped(beat: dict[str, Any]) -> bool:
    """Does a signal keep the process of a beat, on this machine, from running?"""
    stopped = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    try:
        return beat["host"] == socket.gethostname() and psutil.Process(beat["pid"]).status() in stopped
    except psutil.Error:
        return False


def has_died(beat: dict[str, Any]) -> bool:
    """Is the process of a beat, on this machine, no more?"""
    if beat["host"] != socket.gethostname():
        return False
    try:
        return bool(psutil.Process(beat["pid"]).status() == psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return True
