"""One rank's part in measuring what several ranks bring; see `vivace.profiling.together`."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from vivace.data.order import ordered, share_of
from vivace.errors import JobError
from vivace.job import Job
from vivace.machine import Machine
from vivace.observing.observe import now
from vivace.plan import Plan
from vivace.profiling.law import COUNTS, Law, link_of
from vivace.session.opening import call, checked_step, fed, first_batches, readable, start
from vivace.session.session import Session
from vivace.tensors.trees import Again, batch_size, bytes_of
from vivace.training.ranks import for_so_many, met_under

BATCHES = 4
WARM_STEPS = 3
BLOCK_SECONDS = 0.15
FEWEST_ROUNDS, MOST_ROUNDS = 4, 15


class Together:
    """Commands of the child: `measure`. All ranks do the same at the same time."""

    def __init__(self, job: Job, machine: dict[str, Any], meeting: str) -> None:
        self.job, self.machine = job, Machine.from_dict(machine)
        self.ranks = met_under(meeting)

    def measure(self, plan: dict[str, Any], strict: bool, seconds: float) -> dict[str, Any]:
        """The figures of the `Law`, and the plan's promise. Raises JobError, Refused."""
        with self.ranks.answering("its measurement"):
            return self._measured(Plan.from_dict(plan), strict, seconds)

    def _measured(self, plan: Plan, strict: bool, seconds: float) -> dict[str, Any]:
        num, rank = self.ranks.world_size, self.ranks.rank
        wholes = first_batches(readable(call(self.job, "data"), self.job), BATCHES)
        size = batch_size(wholes[0])
        wholes = [batch for batch in wholes if batch_size(batch) == size]
        share_of(wholes[0], rank, num)  # raises where it cannot be shared
        # A single sample has no statistics, which BatchNorm refuses.
        counts = [n for n in sorted({*COUNTS, num}) if size % n == 0 and (size > n or n == num)]
        parts = {n: [share_of(batch, rank % n, n) for batch in wholes] for n in counts}
        with (
            start(self.job, for_so_many(plan, 1), self.machine, strict=strict) as alone,
            start(self.job, plan, self.machine, strict=strict) as together,
        ):
            if together.build.own_step:
                raise JobError("a job with its own step= is not measured on several ranks: ddp cannot cut it")
            checked_step(alone, Again(parts[num][0])())
            checked_step(together, Again(parts[num][0])())
            blocks = {n: self._block(alone, parts[n]) for n in counts} | {
                0: self._block(together, parts[num])
            }
            steps = self._rounds(blocks, seconds)
            reading = self._reading(together, seconds / 8)
            looping, waited = self._looping(together, seconds / 4)
            num_bytes, messages = _exchanged(together)
            small, whole = self._exchange(together.build.device, num_bytes, messages)
            latency, rate = link_of(num, small, whole, messages, num_bytes)
            promise = together.promise.name.lower()
        stepping = steps.pop(0)
        law = Law(num, size, steps, stepping, looping, reading, waited, num_bytes, messages, latency, rate)
        return {"law": law.to_dict(), "expected": law.expected(), "promise": promise}

    def _block(self, session: Session, parts: list[Any]) -> Callable[[], float]:
        """``() -> seconds a step`` of the slowest rank, over a block of steps that all begin at once."""
        device, again = session.build.device, [Again(part) for part in parts]

        def run(steps: int) -> float:
            self.ranks.gather(None)
            begin = now(device)
            for number in range(steps):
                session.step(again[number % len(parts)]())
            return self.ranks.largest((now(device) - begin) / steps)[0]

        each = run(WARM_STEPS)
        steps = max(1, math.ceil(BLOCK_SECONDS / max(min(each, run(WARM_STEPS)), 1e-6)))
        return lambda: run(steps)

    def _rounds(self, blocks: dict[int, Callable[[], float]], seconds: float) -> dict[int, float]:
        """The median block of each, taken in turn, so that a drift of the machine meets all alike."""
        deadline, found = time.monotonic() + seconds, {n: list[float]() for n in blocks}
        for number in range(MOST_ROUNDS):
            late = self.ranks.from_first(time.monotonic() > deadline)
            if number >= FEWEST_ROUNDS and late:
                break
            for n, block in blocks.items():
                found[n].append(block())
        return {n: statistics.median(spent) for n, spent in found.items()}

    def _parts(self, session: Session) -> Iterator[Any]:
        """This rank's parts of the batches, epoch after epoch, as `train` feeds them."""
        loader = call(self.job, "data")
        for epoch in range(1000):
            rank, world_size = self.ranks.rank, self.ranks.world_size
            source = ordered(loader, seed=0, epoch=epoch, rank=rank, world_size=world_size)
            yield from (batch for batch in fed(session, source, epoch) if batch is not None)
            loader = source if type(source) is type(loader) else call(self.job, "data")

    def _reading(self, session: Session, seconds: float) -> float:
        """Seconds in which the loader gives a part, while nothing else is done."""
        source = self._parts(session)
        next(source)
        self.ranks.gather(None)
        begin = time.perf_counter()
        num = sum(1 for _ in islice(_until(source, begin + seconds), 200))
        return self.ranks.largest((time.perf_counter() - begin) / max(1, num))[0]

    def _looping(self, session: Session, seconds: float) -> tuple[float, float]:
        """Seconds of a step that the loader feeds, and how many of these it waits; of the slowest rank."""
        source, device = self._parts(session), session.build.device
        walls, waits = list[float](), list[float]()
        deadline = time.monotonic() + seconds
        while len(walls) < 8 or not self.ranks.from_first(time.monotonic() > deadline or len(walls) >= 200):
            begin = now(device)
            batch = next(source)
            waits.append(time.perf_counter() - begin)
            session.step(batch)
            walls.append(now(device) - begin)
        wall, waited = statistics.median(walls[2:]), statistics.median(waits[2:])
        slowest = max(self.ranks.numbers(wall, waited))
        return slowest[0], slowest[1]

    def _exchange(self, device: torch.device, num_bytes: int, messages: int) -> tuple[float, float]:
        """Seconds of a tiny all-reduce, and of a step's whole exchange, with nothing beside."""
        tiny = torch.zeros(1, device=device)
        whole = [torch.zeros(max(1, num_bytes // messages // 4), device=device) for _ in range(messages)]

        def seconds(tensors: list[torch.Tensor]) -> float:
            spent = []
            for _ in range(7):
                self.ranks.gather(None)
                begin = now(device)
                for tensor in tensors:
                    dist.all_reduce(tensor)
                spent.append(self.ranks.largest(now(device) - begin)[0])
            return statistics.median(spent[2:])

        return seconds([tiny]), seconds(whole)


def _until(source: Iterator[Any], end: float) -> Iterator[Any]:
    for batch in source:
        yield batch
        if time.perf_counter() > end:
            return


def _exchanged(session: Session) -> tuple[int, int]:
    """Bytes and messages of a step's exchange, as all-reduces: the gradients in buckets, or blocks that are
    gathered twice and whose gradients are scattered, what is around them once; and the loss.
    """
    build = session.build
    trained = [p for model in build.models for p in model.parameters() if p.requires_grad]
    num_bytes = bytes_of(trained)
    if build.shards is None:
        (parallel,) = build.parallel
        messages = math.ceil(num_bytes / parallel.bucket_bytes_cap)
    else:
        messages = 3 * (build.facts.sharded_blocks or 0) + 2
    return int(num_bytes * (build.facts.exchanged_share or 1.0)), messages + 1
