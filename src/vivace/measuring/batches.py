"""Samples a second and peak memory against the size of the batch: the fastest one is not always the largest.

Nothing is decided here. Another batch is another training: the learning rate has to follow it, and only the
metric can judge the result.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import time
from collections.abc import Sequence
from typing import Any

from vivace import words
from vivace.errors import Refused, ran_out_of_memory
from vivace.job import Job
from vivace.ledger import Ratio
from vivace.machine import Machine
from vivace.measuring.statistics import speed_ratio
from vivace.observing.observe import now, observe
from vivace.plan import Plan
from vivace.session.opening import call, first_batches, readable, start
from vivace.session.session import Session
from vivace.tensors.trees import Again, batch_size, joined, split

SHARES = (0.25, 0.5, 2.0, 4.0)  # of the job's own batch
FEWEST, MOST = 4, 12  # rounds in which all sizes take turns


@dataclasses.dataclass(frozen=True)
class Batch:
    """One size: its speed, the ratio per sample against the job's own, and its peak. Or why there is none."""

    samples: int
    samples_per_second: float | None = None
    ratio: Ratio | None = None
    peak_bytes: int | None = None
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Curve:
    """All sizes in ascending order, and the rule by which the learning rate would have to follow.

    `base_samples` is what the ratios are against: the job's own batch, or the largest that fits.
    """

    base_samples: int
    batches: list[Batch]
    rule: str

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types, to cross to the parent process."""
        return dataclasses.asdict(self)


def batch_curve(job: Job, machine: Machine, plan: Plan, budget_bytes: int | None, seconds: float) -> Curve:
    """Time steps on smaller and larger batches in turns with the job's own, for about `seconds`.

    A size whose peak would be above `budget_bytes`, by what the smaller ones need, is not run. Raises
    Refused where the batch cannot be cut or joined.
    """
    batches = first_batches(readable(call(job, "data"), job), int(max(SHARES)))
    own = batch_size(batches[0])
    inputs = {own: batches[0]}
    for share in SHARES:
        if (samples := int(share * own)) and samples not in inputs:
            inputs[samples] = _of_size(batches, samples)
    found: dict[int, Batch] = {}
    with start(job, plan, machine) as session:
        for samples in sorted(inputs):
            found[samples] = _tried(session, inputs[samples], samples, budget_bytes, list(found.values()))
        able = [samples for samples, batch in found.items() if not batch.reason]
        if not able:
            raise Refused(f"no batch from {min(found)} samples on fits: {found[min(found)].reason}")
        base = own if own in able else max(able)
        times = _rounds(session, {samples: inputs[samples] for samples in able}, seconds)
        rule = _rule(session)
    for samples, own_times in times.items():
        pairs = [(a / base, b / samples) for a, b in zip(times[base], own_times, strict=True)]
        middle = sorted(own_times)[len(own_times) // 2]
        found[samples] = dataclasses.replace(
            found[samples], samples_per_second=samples / middle, ratio=speed_ratio(pairs)
        )
    return Curve(base, list(found.values()), rule)


def _of_size(batches: Sequence[Any], samples: int) -> Any:
    """So many samples of the first batches, which need not be of one size; None where there are fewer."""
    sizes = itertools.accumulate(map(batch_size, batches))
    needed = next((number for number, size in enumerate(sizes, 1) if size >= samples), None)
    if needed is None:
        return None
    whole = batches[0] if needed == 1 else joined(batches[:needed])
    return None if whole is None else split(whole, samples)[0]


def _tried(
    session: Session, batch: object, samples: int, budget_bytes: int | None, smaller: list[Batch]
) -> Batch:
    """The peak of a size, or why it cannot run."""
    if batch is None:
        return Batch(samples, reason="the job's data has too few batches, or batches that cannot be joined")
    known = [(b.samples, b.peak_bytes) for b in smaller if b.peak_bytes is not None]
    if budget_bytes is not None and len(known) > 1:
        (less, low), (more, high) = known[-2:]
        expected = high + (high - low) * (samples - more) / (more - less)
        if expected > budget_bytes:
            return Batch(samples, reason=f"it would need about {words.size(expected)}")
    try:
        peak = observe(session, [batch]).peak_bytes
    except Exception as error:
        if not ran_out_of_memory(error):
            raise
        gc.collect()
        return Batch(samples, reason="it runs out of memory")
    if budget_bytes is not None and peak > budget_bytes:
        return Batch(samples, peak_bytes=peak, reason=f"it needs {words.size(peak)}")
    return Batch(samples, peak_bytes=peak)


def _rounds(session: Session, inputs: dict[int, Any], seconds: float) -> dict[int, list[float]]:
    """Seconds of a step on each size, taken in turns."""
    times: dict[int, list[float]] = {samples: [] for samples in inputs}
    again = {samples: Again(batch) for samples, batch in inputs.items()}
    begin = time.perf_counter()
    for number in range(MOST):
        for samples, given in again.items():
            batch, before = given(), now(session.build.device)
            session.step(batch)
            times[samples].append(now(session.build.device) - before)
        late = (time.perf_counter() - begin) * (number + 2) / (number + 1) > seconds
        if late and number + 1 >= FEWEST:
            break
    return times


def _rule(session: Session) -> str:
    """How the learning rate follows the batch: adaptive methods take the square root of its factor."""
    adaptive = any("betas" in group for o in session.optimizers for group in o.param_groups)
    return "square root" if adaptive else "linear"
