"""Batches of a script's own DataLoader, fetched ahead in worker processes: the same ones in the same order.

The script keeps its iterator, which asks for its indices and draws its random numbers as ever. Only what
reads a batch is another: a worker, who was told the index before. Whatever fails there is read here instead.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
import torch

from vivace import words
from vivace.ledger import Profile
from vivace.live.candidates import of_loading
from vivace.live.crew import CannotFetch, Crew
from vivace.live.fetching import Traces, difference, num_bytes
from vivace.live.passes import Pass
from vivace.live.proof import Verdict
from vivace.live.spending import Spending
from vivace.machine import Machine
from vivace.plan import Plan
from vivace.profiling.record.guard import Guard, described
from vivace.profiling.record.hooks import Patches
from vivace.technique import Technique
from vivace.torch_internals.loaders import FETCHERS, HereIterator, LoaderIterator, fetcher_of

WORTH = 0.1  # of the steps' time: waiting that is worth looking at
WAITS_MOST = 0.5  # waiting that hides what else there is
LOOKS = 6  # fetches that are looked at before any worker is started
PROVEN = 6  # batches that are fetched in both places before any is used
MOST_FAULTS = 3  # batches that did not come as they should, each fetched here
SLOT_TIMES = 4  # the largest batch so far
SMALLEST_SLOT = 2**20
SHARE_OF_MEMORY = 0.25  # that is free, for batches on their way
PATIENCE_SECONDS, PATIENCE_TIMES = 2.0, 20  # and times the slowest fetch: then a worker hangs


class Feeding:
    """How long steps wait for their data, and workers in the place of that where it was proven the same.

    `fault` says why workers may not fetch any more; `verdict` what came of the last `prove`; both are for the
    one who leads. `problems` is where faults of ours are told.
    """

    def __init__(
        self, spending: Spending, passes: weakref.WeakKeyDictionary[Any, Pass], problems: list[str]
    ) -> None:
        self.spending, self.clock = spending, spending.clock
        self.guard = Guard(self._fail)
        self.problems = problems
        self._patches = Patches(self.guard)
        self._passes = passes
        self._pid, self._thread = os.getpid(), threading.get_ident()
        self.fault = ""
        self.verdict: Verdict | None = None
        self._reading: Any = None  # the iterator that is asked for a batch
        self._read: list[Pass] = []  # since the step before
        self._seconds = 0.0  # of them
        self._steps: deque[tuple[float, float]] = deque(maxlen=21)  # seconds of reading, and in all
        self._proven: Pass | None = None
        self._technique: Any = None
        self._acts = self._checks = False
        self._to_look = self._to_prove = 0
        self._trace = ""
        self._proof_seconds = 0.0
        self._largest = self._slowest = 0.0
        self._batches_a_step = 1
        self._faults = 0
        self._crew_seconds = 0.0  # of the newest crew, so far

    # What the script's loop calls.

    def install(self) -> None:
        """Begin to look at how long batches are waited for."""
        self._patches.restore()
        self._steps.clear()
        self._patches.replace(LoaderIterator, "__next__", self._next)
        for kind in FETCHERS:
            self._patches.replace(kind, "fetch", self._fetch)

    def close(self) -> None:
        """Leave torch as it was, and no process behind."""
        self._patches.restore()
        self._acts = False
        if os.getpid() == self._pid:
            for each in list(self._passes.values()):
                each.close()

    def stepped(self, seconds: float | None) -> None:
        """A step has ended, after so long or, None, after another kind of work as well."""
        read, self._read = self._read, []
        if read and seconds is not None:
            self._steps.append((self._seconds, seconds))
            self._batches_a_step = len(read)
        self._seconds = 0.0
        fed = self._proven
        if self._acts and fed is not None and read and not any(each.reads_as(fed) for each in read):
            self._cannot("it reads other data than those that were proven")
        if read and seconds is not None and fed is None:
            self._proven = read[0]
            if any(each is not read[0] for each in read):
                self._cannot("it reads several loaders in a step")

    # What the one who leads calls.

    @property
    def waiting(self) -> float:
        """Of the newest steps' time, the share in which they waited for their data."""
        return sum(read for read, _ in self._steps) / max(1e-9, sum(whole for _, whole in self._steps))

    @property
    def seconds_a_step(self) -> float:
        """What workers that are forked and ended at each pass take of each step."""
        batches = self._proven.num_batches if self._proven is not None else 0
        spent = max((each.crew_seconds for each in self._passes.values()), default=0.0)
        return max(spent, self._crew_seconds) * self._batches_a_step / max(1, batches)

    def look(self) -> None:
        """Watch what the next fetches do beside giving batches, where that was not seen."""
        self._to_look = 0 if self._slowest or self.why_not() else LOOKS

    @property
    def is_looking(self) -> bool:
        """Are there fetches to be looked at?"""
        return self._to_look > 0 and not self.fault

    def why_not(self) -> str:
        """Why workers cannot fetch this script's batches, by what was seen; or empty."""
        if self.fault or self._trace:
            return self.fault or self._trace
        if self._proven is None:
            return "its batches come from no loader that can be led"
        return self._proven.why_not

    def candidates(self, machine: Machine, device: torch.device) -> list[Technique]:
        """What may be tried, what promises most first."""
        seconds = sum(whole for _, whole in self._steps) / max(1, len(self._steps))
        loader = {"is_dataloader": True, "num_workers": 0, "in_memory": False}
        features = {"loader": loader, "num_threads": torch.get_num_threads()}
        profile = Profile(device.type, seconds, {"data": self.waiting}, {}, 0, 0.0, 0, 0, features)
        return of_loading(profile, machine)

    def prove(self, technique: Technique, machine: Machine) -> None:
        """Compare the next batches with those of workers as the technique sets them; see `verdict`."""
        self._stop_crews()
        self.verdict, self._proof_seconds = None, 0.0
        self._technique = technique
        why = self.why_not() or _unsuited(technique, machine) or self._too_large(technique)
        self._to_prove = 0 if why else PROVEN
        if why:
            self.verdict = Verdict(False, why)

    def wish(self, plan: Plan) -> None:
        """Let workers fetch from the next batch on where the plan says so and it was proven; else not."""
        proven = self.verdict is not None and self.verdict.kept and not self.fault
        self._acts = proven and self._technique in plan.techniques

    def in_bursts(self, steps: int) -> int:
        """At least so many steps, a multiple of the batches that all workers give at about the same time."""
        num = self._technique.num_workers
        return int(-(-steps // num) * num)

    def check(self) -> None:
        """Compare a batch again, the next that workers fetch."""
        self._checks = True

    def stop(self) -> None:
        """Workers are not needed any more."""
        self._acts, self._to_prove = False, 0
        self._stop_crews()

    def _stop_crews(self) -> None:
        for each in list(self._passes.values()):
            each.close()

    def _too_large(self, technique: Any) -> str:
        need = self._slot_bytes * technique.num_workers * technique.prefetch_factor
        free = psutil.virtual_memory().available
        if need <= SHARE_OF_MEMORY * free:
            return ""
        return (
            f"batches on their way would take {words.size(need)}, and {words.size(free)} of memory are free"
        )

    @property
    def _slot_bytes(self) -> int:
        return SMALLEST_SLOT + int(SLOT_TIMES * self._largest)

    # What torch calls.

    def _next(self, original: Callable[..., Any]) -> Any:
        def following(iterator: Any) -> Any:
            each = self._passes.get(iterator)
            outer = self._reading is not None or threading.get_ident() != self._thread
            if outer or each is None:
                return original(iterator)
            self._reading = iterator
            begin, own = self.clock.wall(), self.spending.waited
            try:
                batch = original(iterator)
                self._read.append(each)
                return batch
            finally:
                self._reading = None
                self._seconds += self.clock.wall() - begin - (self.spending.waited - own)

        return following

    def _fetch(self, original: Callable[..., Any]) -> Any:
        def fetch(fetcher: Any, index: object) -> Any:
            iterator = self._reading
            here = partial(original, fetcher, index)
            if not isinstance(iterator, HereIterator) or threading.get_ident() != self._thread:
                return here()
            if fetcher_of(iterator) is not fetcher:  # a data set that reads a loader of its own
                return here()
            each = self._passes[iterator]
            mine = self._proven is not None and not each.why_not and each.reads_as(self._proven)
            if self.fault or not mine:
                return here()
            if self._to_look:
                return self._looked(each, here)
            if self._to_prove:
                return self._compared(each, iterator, fetcher, index, here)
            return self._fed(each, iterator, fetcher, index, here) if self._acts else here()

        return fetch

    def _looked(self, each: Pass, here: Callable[[], Any]) -> Any:
        begin = self.clock.wall()
        before = Traces(*each.data[:2])
        middle = self.clock.wall()
        batch = here()
        after = self.clock.wall()
        self._slowest = max(self._slowest, after - middle)
        self._to_look -= 1
        self._trace = self._trace or before.changed(Traces(*each.data[:2]))
        self._largest = max(self._largest, num_bytes(batch))
        self.spending.waited += middle - begin + self.clock.wall() - after
        return batch

    def _compared(
        self, each: Pass, iterator: object, fetcher: Any, index: object, here: Callable[[], Any]
    ) -> Any:
        """The script's own batch, and whether workers give the same; before any of theirs is used."""
        batch = here()
        begin = self.clock.wall()
        why = ""
        try:
            theirs = self._from_crew(each, iterator, fetcher, index, twice=True)
            why = difference(batch, theirs)
        except CannotFetch as fault:
            why = str(fault)
        self._to_prove -= 1
        spent = self.clock.wall() - begin
        self._proof_seconds += spent
        self.spending.waited += spent
        if why or not self._to_prove:
            self._to_prove = 0
            each.close()  # they fetch everything twice
            self.verdict = Verdict(not why, why, seconds=self._proof_seconds)
        return batch

    def _fed(self, each: Pass, iterator: object, fetcher: Any, index: object, here: Callable[[], Any]) -> Any:
        try:
            batch = self._from_crew(each, iterator, fetcher, index)
        except CannotFetch as fault:
            self._faults += 1
            each.close()
            if self._faults >= MOST_FAULTS:
                self._cannot(str(fault))
            return here()
        except BaseException:  # such as Ctrl-C in the middle of an answer
            each.close()
            raise
        if not self._checks:
            return batch
        self._checks = False
        own = here()
        why = difference(own, batch)
        if why:
            self._cannot(f"its workers give another batch: {why}")
        return own

    def _from_crew(
        self, each: Pass, iterator: object, fetcher: Any, index: object, *, twice: bool = False
    ) -> Any:
        each.begin(iterator)
        each.leave_stale()
        if each.crew is None:
            patience = PATIENCE_SECONDS + PATIENCE_TIMES * self._slowest
            ahead, num = self._technique.prefetch_factor, self._technique.num_workers
            try:
                crew = Crew(fetcher.fetch, num, ahead, self._slot_bytes, patience)
            except OSError as error:
                raise CannotFetch(f"no worker process can be started: {error}") from None
            each.man(crew)
            self._crew_seconds = crew.own_seconds
        return each.taken(index, twice=twice)

    def _cannot(self, reason: str) -> None:
        self.fault = self.fault or reason
        self.stop()

    def _fail(self, error: Exception) -> None:
        """A fault of ours: batches are fetched here."""
        self.problems.append(described(error))
        self.fault = self.fault or f"a fault of Vivace's own, {type(error).__name__}: {error}"
        self.close()


def _unsuited(technique: Any, machine: Machine) -> str:
    if not technique.num_workers:
        return "its loader has no workers already"
    if technique.num_workers > machine.num_cores:
        return f"num_workers = {technique.num_workers}, but only {machine.num_cores} cores can be used"
    if technique.persistent:
        return "workers that outlive a pass miss what the script changes in its data: set persistent = false"
    return ""
