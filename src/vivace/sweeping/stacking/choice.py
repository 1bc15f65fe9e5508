"""Is a stack faster than its rows one after another? A size rule first, then a measurement in pairs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vivace import words
from vivace.inspection.limits import free_memory
from vivace.ledger import Ratio
from vivace.measuring.statistics import speed_ratio
from vivace.sweeping.stacking.rows import Row
from vivace.sweeping.stacking.stack import Stack
from vivace.tensors.trees import bytes_of

# What a stack saves is what each operator costs beside its arithmetic: a few milliseconds a step at most.
LONGEST_STEP_SECONDS = 0.05
BLOCK_SECONDS = 0.15
LEAST_PAIRS, MOST_PAIRS = 4, 12
MOST_SECONDS = 8.0
FEWEST_AT_ONCE = 4
MEMORY_SHARE = 0.25
COPIES = 5  # of a model's weights: they, their gradients twice, and two states of an optimizer


def too_large(step_seconds: float) -> str:
    """Why measuring would be a waste of time; empty where it is not."""
    if step_seconds > LONGEST_STEP_SECONDS:
        took = words.duration(step_seconds)
        return f"a step alone takes {took}, nearly all of it arithmetic, which no stack saves"
    return ""


def most_rows(row: Row, workers: int, cores: int) -> tuple[int, str]:
    """How many rows fit, and why no more do: into a share of the free memory, and where the loader of each
    has `workers`, onto the cores.
    """
    size = bytes_of(row.model.parameters())
    free = torch.cuda.mem_get_info(row.device)[0] if row.device.type == "cuda" else free_memory()
    fitting = max(1, int(MEMORY_SHARE * free / (COPIES * max(1, size))))
    reading = max(1, cores // workers) if workers else fitting
    if reading < fitting:
        each = f"of {words.count(workers, 'worker')} each"
        return (
            reading,
            f"the cores have room for the loaders, {each}, of {words.count(reading, 'run')} at once",
        )
    return fitting, f"memory has room for {words.count(fitting, 'run')} at once"


def step_seconds(stack: Stack, row: Row) -> float:
    """How long a step alone takes, the fastest of a few; the stack is afterwards as it was."""
    saved, times, clock = stack.saved(), list[float](), clock_of(row.device)
    for batch in itertools.islice(row.batches(row.epoch), 4):
        begin = clock()
        row.step_alone(batch)
        _wait(stack)
        times.append(clock() - begin)
    stack.put_back(saved)
    return min(times)


def clock_of(device: torch.device) -> Callable[[], float]:
    """What times a step: the processor's own seconds where one thread computes all of it, so that what else
    the machine does counts least; else the wall's.
    """
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time if alone else time.perf_counter


def measured(stack: Stack) -> tuple[Ratio, float]:
    """How many times faster the stack is than its rows one after another, with their own loaders, and the
    seconds of a step alone; the stack is afterwards as it was.

    Blocks of both alternate, so that what else the machine does meets both.
    """
    saved, deadline = stack.saved(), time.monotonic() + MOST_SECONDS
    alone, fused = _alone(stack), _fused(stack)
    next(alone), next(fused)  # the first ones allocate
    begin = time.monotonic()
    single = next(alone)
    most = MOST_SECONDS / (4 * LEAST_PAIRS * max(time.monotonic() - begin, 1e-6))  # of a step that waits
    count = max(1, round(min(BLOCK_SECONDS / max(single, 1e-6), most)))
    pairs: list[tuple[float, float]] = []
    while len(pairs) < LEAST_PAIRS or (len(pairs) < MOST_PAIRS and time.monotonic() < deadline):
        before = sum(itertools.islice(alone, count))
        pairs.append((before, sum(itertools.islice(fused, count))))
        if len(pairs) >= LEAST_PAIRS and not _open(speed_ratio(pairs)):
            break
    stack.put_back(saved)
    return speed_ratio(pairs), single / len(stack.rows)


def rows_at_once(stack: Stack) -> int:
    """How many rows to compute at a time: all, or half as many for as long as that is measured faster; the
    stack is afterwards as it was.
    """
    saved, fused, deadline = stack.saved(), _fused(stack), time.monotonic() + MOST_SECONDS
    next(fused)  # the first one allocates
    best = count = len(stack.rows)
    begin = time.monotonic()
    single = next(fused)
    most = MOST_SECONDS / (8 * LEAST_PAIRS * max(time.monotonic() - begin, 1e-6))  # of a step that waits
    block = max(1, round(min(BLOCK_SECONDS / 2 / max(single, 1e-6), most)))
    while (count := -(-count // 2)) >= FEWEST_AT_ONCE:
        pairs: list[tuple[float, float]] = []
        while time.monotonic() < deadline and len(pairs) < MOST_PAIRS:
            times = []
            for stack.at_once in (best, count):
                times.append(sum(itertools.islice(fused, block)))
            pairs.append((times[0], times[1]))
            if len(pairs) >= LEAST_PAIRS and not _open(speed_ratio(pairs)):
                break
        if len(pairs) < LEAST_PAIRS or speed_ratio(pairs).low <= 1.0:
            break
        best = count
    stack.at_once = best
    stack.put_back(saved)
    return best


def _open(ratio: Ratio) -> bool:
    """Is it still undecided which is faster?"""
    return ratio.low <= 1.0 <= ratio.high


def _alone(stack: Stack) -> Iterator[float]:
    """Seconds of one step of each row, one row after another, over and over."""
    feeds, clock = [_endless(row) for row in stack.rows], clock_of(stack.rows[0].device)
    while True:
        begin = clock()
        for row, feed in zip(stack.rows, feeds, strict=True):
            row.step_alone(next(feed))
        _wait(stack)
        yield clock() - begin


def _endless(row: Row) -> Iterator[Any]:
    while True:
        yield from row.batches(row.epoch)


def _fused(stack: Stack) -> Iterator[float]:
    """Seconds of one step of all rows as one, over and over."""
    feed = itertools.chain.from_iterable(stack.feed.epoch(stack.rows) for _ in itertools.count())
    clock = clock_of(stack.rows[0].device)
    while True:
        begin = clock()
        stack.step(next(feed))
        _wait(stack)
        yield clock() - begin


def _wait(stack: Stack) -> None:
    if stack.rows[0].device.type == "cuda":
        torch.cuda.synchronize()
