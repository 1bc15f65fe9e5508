"""A thread of every rank that tells the others it lives, and judges which rank the others wait for.

It goes on while the main thread stands in an exchange, in a person's code or in a system call, hears a
signal there, and breaks the exchange once a rank is lost, so that the others can keep what was trained.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import signal
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import torch

from vivace.data.hanging import children
from vivace.errors import FolderError
from vivace.files import replace_text
from vivace.processes.pipes import ready
from vivace.torch_internals.groups import num_exchanges
from vivace.training.meeting import AWAITED, answer_or_break, open_sockets
from vivace.training.stopping import SIGNALS
from vivace.training.verdict import (
    STOP_SECONDS,
    WARN_SECONDS,
    Seen,
    Sight,
    Verdict,
    has_died,
    is_stopped,
    judge,
)

BEAT_SECONDS = 1.0
WHY_SECONDS = 10.0  # after a broken exchange, until it is known why it broke
FAREWELL_SECONDS = 20.0  # for the others to keep what was trained, before a lost rank ends itself
STACKS_SECONDS = 5.0  # for the others to tell where they stand
LATE_SECONDS = 5.0  # before a command's time is over: from here it is noted which rank the others wait for
_NO_PERSONS = (
    str(Path(str(torch.__file__)).parent),
    str(Path(__file__).parents[1]),
    sysconfig.get_paths()["stdlib"],
    "<frozen",
)


@dataclasses.dataclass
class Activity:
    """What the main thread of this rank does: set there, and told to the others by the watch."""

    what: str = "its start"
    step: int = 0
    agreements: int = 0
    changes: int = 0

    def set(self, what: str, step: int) -> None:
        """From here on the main thread does `what`; `step` steps were begun."""
        self.what, self.step = what, step
        self.changes += 1


class RankWatch:
    """Beats for this rank and watches the others, from `start` to `close`; see the module.

    Args:
        store: of this attempt of the launch; a connection of the watch's own is made of it.
        patience: seconds in which no rank goes on, after which the run ends.
        cut: breaks the exchange in which the main thread may stand.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, patience: float, cut: Callable[[], None]
    ) -> None:
        self.rank, self.world_size, self.patience, self.cut = rank, world_size, patience, cut
        self.activity = Activity()
        self._tell: Callable[[str], None] = say
        self._folder: Path | None = None
        self.verdict: Verdict | None = None
        self.signal = ""  # heard by any rank's watch
        self.limit = math.inf  # on `time.monotonic`: when the ranks' present command is given up
        before = open_sockets()
        self._store = store.clone()
        answer_or_break(open_sockets() - before)
        self._main = threading.current_thread()
        self._told = self._over = self._is_back = False
        self._noted = self._shown = ""
        self._number = 0
        self._sights = [Sight(other, time.monotonic()) for other in range(world_size)]
        self._signals, self._signalled = os.pipe()
        self._before: int | None = None
        self._thread = threading.Thread(target=self._run, name="vivace-rank-watch", daemon=True)

    def start(self) -> None:
        """Begin; called by the thread that trains."""
        os.set_blocking(self._signalled, False)
        if self._main is threading.main_thread():
            self._before = signal.set_wakeup_fd(self._signalled, warn_on_full_buffer=False)
        self._thread.start()

    def close(self) -> None:
        """End the watch. A rank that leaves early says why by `farewell` before."""
        self._over = True
        if self._before is not None:
            signal.set_wakeup_fd(self._before)
        with contextlib.suppress(OSError):
            os.write(self._signalled, b"\0")
        self._thread.join(5.0)
        if not self._thread.is_alive():  # else it may still read there
            os.close(self._signals)
            os.close(self._signalled)

    def told_to(self, folder: Path, notice: Callable[[str], None]) -> None:
        """From here on stacks go to a run's folder, and on rank 0 sentences to its notices."""
        self._folder = folder
        if self.rank == 0:
            self._tell = notice

    def farewell(self, sentence: str) -> None:
        """Tell the others why this rank leaves before the end."""
        self.post(f"farewell/{self.rank}", sentence)

    def post(self, key: str, text: str) -> None:
        """Leave a note for the other ranks, where the store can still be reached."""
        with contextlib.suppress(RuntimeError):
            self._store.set(key, text)

    def read(self, key: str) -> str:
        """A note of a rank; empty where there is none, or the store cannot be reached."""
        try:
            return str(self._store.get(key).decode()) if self._store.check([key]) else ""
        except RuntimeError:
            return ""

    def why(self, seconds: float) -> Verdict:
        """Why an exchange broke, as far as becomes known within `seconds`."""
        self.came_back()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := self.verdict or self._published():  # which the watch may not have seen yet
                return found
            for rank in set(range(self.world_size)) - {self.rank}:
                if gone := self._gone(rank):  # perhaps for a verdict that has not arrived here yet
                    return self._published() or gone
            time.sleep(0.1)
        return self.verdict or Verdict((), "the exchange with the other ranks broke", self.signal)

    def came_back(self) -> None:
        """The main thread has left the exchange in which it stood, and will say itself why it ends."""
        self._is_back = True

    def claim(self, key: str) -> int:
        """The rank that was the first to claim `key`: this one, where no other was."""
        with contextlib.suppress(RuntimeError):
            return int(self._store.compare_set(key, "", str(self.rank)))
        return self.rank

    def _gone(self, rank: int) -> Verdict | None:
        """That a rank has ended or died; None while it lives."""
        if text := self.read(f"farewell/{rank}"):
            return Verdict((rank,), f"rank {rank} has ended: {text}")
        beat = json.loads(self.read(f"beat/{rank}") or "{}")
        if not beat or not has_died(beat):
            return None
        text = f"rank {rank} (process {beat['pid']} on {beat['host']}) has died"
        return Verdict((rank,), f"{text}, while rank {self.rank} was at {self.activity.what}")

    def _published(self) -> Verdict | None:
        """The verdict of the rank that told it; None before that."""
        if not (text := self.read("verdict")):
            return None
        found = json.loads(text)
        return Verdict(tuple(found["ranks"]), found["sentence"], found["signal"])

    def lives(self, rank: int) -> bool:
        """Does the process of a rank run? By the kernel's word on this machine, by its beats elsewhere."""
        beat = json.loads(self.read(f"beat/{rank}") or "{}")
        if not beat:
            return False
        if beat["host"] == socket.gethostname():
            return not has_died(beat) and not is_stopped(beat)
        return not self._sights[rank].see(beat, time.monotonic()).silent

    def may_come(self, rank: int) -> bool:
        """Does a rank live that has not come further than this one, nor said why it ends?"""
        beat = json.loads(self.read(f"beat/{rank}") or "{}")
        behind = bool(beat) and beat["at"] <= self._at()
        return behind and self.lives(rank) and not self.read(f"farewell/{rank}")

    def end_stopped(self, ranks: tuple[int, ...]) -> None:
        """Kill those processes of this machine that were judged and cannot end themselves."""
        for rank in ranks:
            beat = json.loads(self.read(f"beat/{rank}") or "{}")
            if beat and rank != self.rank and is_stopped(beat):
                with contextlib.suppress(OSError):
                    os.kill(beat["pid"], signal.SIGKILL)

    def _run(self) -> None:
        reached_at = time.monotonic()
        with contextlib.suppress(RuntimeError):  # at once: a rank that dies soon was seen, too
            self._beat()
        while self.verdict is None:
            self._listen(BEAT_SECONDS)
            if self._over:
                return
            try:
                self._beat()
                self._look()
                reached_at = time.monotonic()
            except RuntimeError:  # the store cannot be reached
                self._stand_alone(time.monotonic() - reached_at)
        self._end(self.verdict)

    def _listen(self, seconds: float) -> None:
        """Wait, and note a signal that the main thread may be too deep in an exchange to answer."""
        for number in os.read(self._signals, 64) if ready([self._signals], seconds=seconds) else b"":
            name = next((name for name in SIGNALS if signal.Signals[name] == number), "")
            self.signal = self.signal or name

    def _beat(self) -> None:
        self._number += 1
        self._store.set(f"beat/{self.rank}", json.dumps(self._own_beat()))

    def _own_beat(self) -> dict[str, Any]:
        activity = self.activity
        return {
            "number": self._number,
            "at": self._at(),
            "changes": activity.changes,
            "what": activity.what,
            "work": _work(),
            "asked": self.signal,
            "where": self._where(),
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }

    def _at(self) -> list[int]:
        return [self.activity.step, self.activity.agreements, num_exchanges()]

    def _look(self) -> None:
        """Judge the others by their beats; the first rank that lives tells it and publishes the verdict."""
        if published := self._published():
            self.verdict = published
            return
        now = time.monotonic()
        beats = [self.read(f"beat/{rank}") for rank in range(self.world_size)]
        if not all(beats):
            return  # one has joined a moment ago
        seen = [sight.see(json.loads(beat), now) for sight, beat in zip(self._sights, beats, strict=True)]
        self.signal = self.signal or next((one.beat["asked"] for one in seen if one.beat["asked"]), "")
        awaited = self._awaited(seen) if now > self.limit - LATE_SECONDS else ""
        if awaited != self._noted:
            self._noted = awaited
            self.post(AWAITED, awaited)
        verdict, ends = judge(seen, self.patience)
        self._told = self._told and verdict is not None
        if (asked := self.read("stacks")) != self._shown:
            self._shown = asked
            self._store.set(f"stack/{asked}/{self.rank}", self._stack())
        if verdict is None:
            return
        if self.rank != next(one.rank for one in seen if not one.silent):
            return
        if not self._told:
            self._told = True
            self._write_stacks(seen)
            self._tell(verdict.sentence)
        if ends:
            self._store.compare_set("verdict", "", json.dumps(dataclasses.asdict(verdict)))

    def _awaited(self, seen: list[Seen]) -> str:
        """For which rank this one waits, in a sentence; empty where it waits for none, or a moment only."""
        verdict, _ = judge(seen, LATE_SECONDS)
        waits = verdict is not None and verdict.ranks and self.rank not in verdict.ranks
        return verdict.sentence if verdict is not None and waits else ""

    def _stand_alone(self, seconds: float) -> None:
        """The store has not been reached for so long: is the launcher gone, or the link to it?"""
        own = self._sights[self.rank].see(self._own_beat(), time.monotonic())
        if seconds >= min(WARN_SECONDS, self.patience) and own.still_seconds >= STOP_SECONDS:
            text = (
                f"rank {self.rank} cannot reach the launch any more: its launcher or the link to it is gone"
            )
            self.verdict = Verdict((), text, self.signal)

    def _end(self, verdict: Verdict) -> None:
        """Break the exchange, and go on beating. A main thread that hangs does not come back: then end the
        process, once the others have heard what was kept.
        """
        self.cut()
        begin, others = time.monotonic(), set(range(self.world_size)) - set(verdict.ranks)
        while not self._over:
            self._listen(BEAT_SECONDS)
            with contextlib.suppress(RuntimeError):
                self._beat()
            if self._over or self._is_back or self.rank not in verdict.ranks:
                continue
            waited, deaf = time.monotonic() - begin, [one for one in others if not self.read(f"heard/{one}")]
            keeping = self._folder is not None and any(map(self.lives, deaf))
            seconds = self.patience if keeping else FAREWELL_SECONDS
            if waited >= seconds or (others and not deaf):
                say(f"rank {self.rank}, which the others have given up, ends itself at {self._where()}")
                os._exit(128 + signal.Signals[verdict.signal] if verdict.signal else 1)

    def _frames(self) -> list[traceback.FrameSummary]:
        frame: FrameType | None = sys._current_frames().get(self._main.ident or 0)
        return list(traceback.extract_stack(frame)) if frame is not None else []

    def _stack(self) -> str:
        return "".join(traceback.format_list(self._frames()))

    def _where(self) -> str:
        """The innermost line of the main thread that is a person's, else the innermost one."""
        frames = self._frames()[::-1]
        own = [one for one in frames if not one.filename.startswith(_NO_PERSONS)]
        own = [one for one in own if "site-packages" not in one.filename] or frames
        return f"{Path(own[0].filename).name}:{own[0].lineno} in {own[0].name}" if own else "its end"

    def _write_stacks(self, seen: list[Seen]) -> None:
        if self._folder is None:
            return
        asked, deadline = str(self._number), time.monotonic() + STACKS_SECONDS
        self.post("stacks", asked)
        self.post(f"stack/{asked}/{self.rank}", self._stack())
        expected = [f"stack/{asked}/{one.rank}" for one in seen if not one.silent]
        while not all(map(self.read, expected)) and time.monotonic() < deadline:
            time.sleep(0.1)
        parts = []
        for one in seen:
            stack = self.read(f"stack/{asked}/{one.rank}") or "no stack came from the process\n"
            parts.append(f"rank {one.rank}, process {one.beat['pid']} on {one.beat['host']}\n{stack}")
        with contextlib.suppress(FolderError):
            replace_text(self._folder / "stacks.txt", "\n".join(parts))


def say(text: str) -> None:
    """A line on standard error, from whichever rank."""
    print(f"vivace: {text}", file=sys.stderr, flush=True)


def _work() -> float:
    """Seconds of processor time of this process and of those that its main thread has started."""
    total = time.process_time()
    for child in children():
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(child).cpu_times()
            total += times.user + times.system
    return total
