"""Rules about memory: it grows, a graph outlives its step, the peak is not where training is, fragments."""

from __future__ import annotations

import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

from vivace import words
from vivace.profiling.seen import Seen, Verdict

GROWTH = 0.03
STEADY = 0.5
FIRST_TOUCH = 2**30  # bytes/s at which a system hands out memory that was not used before, where not measured
TOUCHED_TWICE = 1.5  # times: memory that is new is not in the caches when it is written
HIGHER, HIGHER_BYTES = 1.2, 32 * 2**20  # times and bytes by which one peak must exceed another to be told
SCARCE = 0.5  # of the device: a validation without gradients that peaks below it is no fault
LARGE_KEPT = 0.1  # of the step's own peak
LONG = 2.0  # times the usual batch's elements
SETTLING = 2  # first steps, whose peaks do not count
VALIDATION_ADVICE = (
    "torch.no_grad() around validation, smaller batches in it, and outputs that are not collected"
)


def memory(seen: Seen) -> Verdict | None:
    """The first that is found: memory grows, a graph is kept, the peak comes late, memory is fragmented."""
    live = seen.record.get("live") or {}
    steps = max(1, live.get("steps") or 1)
    more = (live.get("after") or 0) - (live.get("before") or 0)
    resident = seen.record.get("resident") or []
    rate = _growth(resident) if _holds_more(seen, resident) else 0.0
    if steps >= 8 and more >= 0.9 * steps:
        held = live.get("held") or []
        by = f", held by {_holder(held[0])}" if held else ""
        size = f", {words.size(rate * len(resident))} in {len(resident)} steps" if rate > 0 else ""
        evidence = f"{more / steps:.1f} tensors with their backward graph stay alive each step{by}{size}"
        advice = "keep loss.item() or loss.detach(), not the loss"
        return Verdict("memory", evidence, 1.0, _without_growth(seen, rate), advice)
    grown = min(rate * len(resident), resident[-1] - resident[0]) if rate > 0 else 0.0
    if grown > max(GROWTH * resident[0], 8 * 2**20):
        evidence = (
            f"memory grows by {words.size(rate)} a step: from {words.size(resident[0])} to "
            f"{words.size(resident[-1])} in {len(resident)} steps"
        )
        advice = "look for lists or caches that the loop appends to"
        return Verdict("memory", evidence, 1.0, _without_growth(seen, rate), advice)
    for rule in (_retained, _late_peak, _later_validation):
        if (verdict := rule(seen)) is not None:
            return verdict
    if retries := seen.record.get("allocator_retries"):
        evidence = (
            f"the allocator ran out of memory and started anew {retries} times in {len(resident)} steps: "
            "it is fragmented"
        )
        advice = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        return Verdict("memory", evidence, 1.0, 1.3, advice)
    return None


def _holder(name: str) -> str:
    """``losses (train.py)`` of a name and its file."""
    name, _, file = name.removesuffix(")").partition(" (")
    return f"{name} ({Path(file).name})"


def _without_growth(seen: Seen, rate: float) -> float:
    """At most so many times as fast: memory that is new in every step has to be cleared, bytes a step."""
    return 1.1 / (1 - _touching(seen, rate))


def _touching(seen: Seen, size: float) -> float:
    """Share of the step that it takes to write so many bytes of memory that is new, at most 0.5."""
    if seen.device != "cpu":
        return 0.0
    seconds = TOUCHED_TWICE * size / (seen.record.get("first_touch") or FIRST_TOUCH)
    return min(0.5, seconds / seen.step_seconds)


def _holds_more(seen: Seen, resident: list[int]) -> bool:
    """Does somebody hold at least half of what memory grew by? The rest lies in pieces between what is used,
    as batches of many sizes leave it.
    """
    before, after = seen.record.get("allocated") or (None, None)
    return before is None or after is None or after - before >= 0.5 * (resident[-1] - resident[0])


def _growth(resident: list[int]) -> float:
    """Bytes a step by which memory grows steadily: each quarter of the steps above the one before, the last
    by at least half as much as the others; else 0. What levels off is the C library's, not a leak.
    """
    length = len(resident) // 4
    if length < 2:
        return 0.0
    quarters = [statistics.median(resident[i * length : (i + 1) * length]) for i in range(4)]
    rises = [after - before for before, after in pairwise(quarters)]
    if min(rises) <= 0 or rises[-1] < STEADY * statistics.fmean(rises):
        return 0.0
    return sum(rises) / (3 * length)


def _retained(seen: Seen) -> Verdict | None:
    """The last backward pass of each step keeps its graph, which no other pass uses.

    To let it go may cost time on a CPU: what is freed goes back to the system, and is new in the next step.
    """
    course = seen.record.get("course") or []
    kept = seen.record.get("activation_bytes") or 0
    peak = seen.record.get("held_bytes", 0) + seen.trace.get("rise_bytes", 0)
    alive = (seen.record.get("live") or {}).get("after")  # else the graph goes with its loss
    retaining = sum(row["retains"] for row in course)
    if not alive or len(course) < 8 or retaining < 0.9 * len(course) or kept < LARGE_KEPT * peak:
        return None
    evidence = (
        f"{seen.short(seen.record['retained_at'])} keeps the graph of every backward pass: "
        f"{words.size(kept)} of activations are still there while the next step makes its own"
    )
    return Verdict("memory", evidence, 1 - _touching(seen, kept), 1.1, "backward() without retain_graph=True")


def _late_peak(seen: Seen) -> Verdict | None:
    """What needs the most memory is a validation pass, or the batch with the longest samples."""
    course = (seen.record.get("course") or [])[SETTLING:]
    if len(course) < 8:
        return None
    usual = statistics.median(row["elements"] for row in course)
    validating, long = [], []
    for before, row in pairwise(course):
        if row["validates"]:
            validating.append((row["peak"] - before["peak"], row))
        elif row["elements"] > LONG * usual > 0:
            long.append((row["peak"] - before["peak"], row))
    peak = course[-1]["peak"]
    for rises, rare in ((validating, 2 * len(validating) < len(course)), (long, True)):
        own = peak - sum(rise for rise, _ in rises)
        if not rare or peak < max(HIGHER * own, own + HIGHER_BYTES):
            continue
        if rises is validating:
            if not _is_avoidable(seen, peak, any(row.get("gradients", True) for _, row in rises)):
                continue
            where = _at(seen, seen.record.get("evaluated_at"))
            evidence = f"validation{where} needs {words.size(peak)}, training {words.size(own)}"
            advice = VALIDATION_ADVICE
        else:
            largest = max(row["elements"] for _, row in long) / usual
            evidence = (
                f"the longest samples need {words.size(peak)}, the others {words.size(own)}: the largest "
                f"batch has {largest:.1f} times as many elements as the usual one"
            )
            advice = "cut or sort samples by length, or fill a batch up to a number of elements"
        return Verdict("memory", evidence, 1.0, _without(course, [row for _, row in rises]), advice)
    return None


def _later_validation(seen: Seen) -> Verdict | None:
    """The same for validation after the profiled steps, of which only the peak is known."""
    late = seen.record.get("late") or {"peak": 0, "rise": 0}
    peak, own = late["peak"], late["peak"] - late["rise"]
    if peak <= max(HIGHER * own, own + HIGHER_BYTES):
        return None
    if not _is_avoidable(seen, peak, late.get("gradients", True)):
        return None
    where = _at(seen, late.get("at"))
    evidence = f"validation{where} needs {words.size(peak)}, everything before it {words.size(own)}"
    return Verdict("memory", evidence, 1.0, 1.0, VALIDATION_ADVICE)


def _is_avoidable(seen: Seen, peak: int, gradients: bool) -> bool:
    """Is a validation's peak a fault: with `gradients` that nobody needs, or where memory is scarce?"""
    there = next((d.memory_bytes for d in seen.machine.devices if d.kind == seen.device), 0)
    return gradients or 0 < SCARCE * there < peak


def _at(seen: Seen, site: str | None) -> str:
    return f" ({seen.short(site)})" if site else ""


def _without(course: list[dict[str, Any]], rare: list[dict[str, Any]]) -> float:
    """How many times as fast all steps were if the rare ones took no longer than the others."""
    whole: float = sum(row["wall"] for row in course)
    usual = statistics.median(row["wall"] for row in course)
    excess: float = sum(max(0.0, row["wall"] - usual) for row in rare)
    return 1.1 / (1 - min(0.9, excess / whole))
