"""How many trials run side by side: as many as fit cores and memory, while more are measured faster."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from vivace import words
from vivace.errors import VivaceError
from vivace.inspection.limits import free_memory
from vivace.ledger import Ratio
from vivace.machine import Machine
from vivace.measuring.statistics import speed_ratio
from vivace.plan import Plan
from vivace.processes.launch import Child, Source
from vivace.sweeping.space import Parameters

SIDE = "vivace.sweeping.side:Side"
SILENCE_SECONDS = 7 * 86400.0  # an epoch may take long; a child that hangs is for the person to end
BLOCK_SECONDS = 0.1
LEAST_PAIRS, MOST_PAIRS = 4, 8
SURE = 1.05  # so much faster must one thread be than all, where trials train one after another
MEMORY_SHARE = 0.8  # of what is free; a trial's metric and its data may take more than its steps


@dataclasses.dataclass(frozen=True)
class Packing:
    """`workers` trials at a time on `threads` each. `ratio` is how many times the steps of one after another,
    on one thread or on all, whichever is faster, they took in the same time, or where they are not side by
    side the first ones tried. `trial_bytes` is what the largest trial held at most, `room` how many of it
    fit. `reason` says where nothing was measured.
    """

    workers: int
    threads: int
    ratio: Ratio | None = None
    tried: int = 0
    trial_bytes: int = 0
    room: int = 0
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types, with the decision in a sentence."""
        return {**dataclasses.asdict(self), "sentence": self.sentence}

    @property
    def sentence(self) -> str:
        """For the first screen; empty where the person has decided."""
        if not (self.ratio or self.reason):
            return ""
        head = f"{words.count(self.workers, 'trial')} at a time on {words.count(self.threads, 'thread')}"
        if self.ratio is None:
            return f"{head}: {self.reason}"
        measured = words.speed(self.ratio)
        if not (self.ratio.wide and self.ratio.low > 1.0):  # of which only the lower end is told
            measured += f" ({words.interval(self.ratio.low, self.ratio.high)})"
        room = f"memory has room for {words.number(self.room)}"
        if self.workers == 1:
            return f"{head}: {self.tried} side by side are not measured faster, {measured}; {room}"
        return f"{head} each: {measured} the steps of one after another; {room}"


def packed(
    source: Source, machine: Machine, parameters: Parameters, plan: Plan, most: int, seed: int, log: Path
) -> Packing:
    """How many trials should run at a time.

    Args:
        source: the job's function.
        parameters: of the largest model that is searched.
        plan: under which trials train.
        most: how many are of any use.
        log: file of the children.
    """
    cores = machine.num_cores
    if min(cores, most) < 2:
        return Packing(1, cores)
    begun = {"machine": machine.to_dict(), "parameters": parameters}
    free = free_memory()
    with ExitStack() as stack, ThreadPoolExecutor(cores) as pool:
        children: list[Child] = []

        def fill(count: int) -> None:
            while len(children) < count:
                children.append(stack.enter_context(Child(SIDE, source, begun, log=log)))
                children[-1].ask("open", SILENCE_SECONDS, plan=plan.to_dict(), seed=seed, strict=False)

        def rate(count: int, threads: int) -> float:
            """Steps a second of so many side by side."""
            asked = {"threads": threads, "seconds": BLOCK_SECONDS}
            one = [pool.submit(child.ask, "pace", SILENCE_SECONDS, **asked) for child in children[:count]]
            return float(sum(future.result() for future in one))

        try:
            fill(1)
            needs = children[0].ask("needs", SILENCE_SECONDS)
            room = max(1, int(MEMORY_SHARE * (needs["free"] or free) / max(1, needs["bytes"])))
            found = Packing(1, cores, trial_bytes=needs["bytes"], room=room)
            limit = min(cores, most, room)
            if limit < 2:
                reason = f"memory has room for one, which takes {words.size(needs['bytes'])}"
                return dataclasses.replace(found, reason=reason)
            if _measured(partial(rate, 1, cores), partial(rate, 1, 1), SURE).low > SURE:
                found = dataclasses.replace(found, threads=1)
            gain = Ratio(1.0, 1.0, 1.0)
            while found.workers < limit:
                more = min(2 * found.workers, limit)
                fill(more)
                fewer = partial(rate, found.workers, found.threads)
                ratio = _measured(fewer, partial(rate, more, cores // more))
                if ratio.low <= 1.0:
                    return found if found.ratio else dataclasses.replace(found, ratio=ratio, tried=more)
                gain = Ratio(*(a * b for a, b in zip(_ends(gain), _ends(ratio), strict=True)))
                now: dict[str, Any] = {"workers": more, "threads": cores // more, "tried": more}
                found = dataclasses.replace(found, **now, ratio=gain)
            return found
        except VivaceError as error:  # what is wrong with a job, each trial says of itself
            return Packing(1, cores, reason=f"side by side could not be measured: {error}")


def _measured(one: Callable[[], float], other: Callable[[], float], mark: float = 1.0) -> Ratio:
    """How many times the steps of `one` the `other` takes, by blocks in turn; more of them where the
    interval has `mark` in it.
    """
    pairs: list[tuple[float, float]] = []
    while len(pairs) < MOST_PAIRS:
        pairs.append((1 / one(), 1 / other()))
        if len(pairs) >= LEAST_PAIRS and not (ratio := speed_ratio(pairs)).low <= mark <= ratio.high:
            break
    return speed_ratio(pairs)


def _ends(ratio: Ratio) -> Sequence[float]:
    return ratio.estimate, ratio.low, ratio.high
