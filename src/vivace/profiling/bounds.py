"""What bounds a step in which nothing is wrong: handing operators over, its batch, its update, its paging.

None of these is a fault, so none is a verdict: a tutorial's network is small on purpose. Each has its
evidence, the gain as an interval, and the next step, as verdicts have. Torch-free.
"""

from __future__ import annotations

from typing import Any

from vivace import words
from vivace.profiling.seen import Seen, Verdict

LARGE_SHARE = 0.2  # of the step
CLEAR_GAIN = 1.1
FREE, CHEAP = 1.3, 1.75  # times as long as one batch that two of them take
FAULT_SECONDS, MOST_PAGING = (0.1e-6, 1e-6), 0.5


def bounds(seen: Seen, num_kernels: int) -> list[Verdict]:
    """Those that hold for this step, the one that would bring most first."""
    rules = (_batch(seen, num_kernels), _update(seen), _paging(seen), _swapping(seen))
    found = [bound for bound in rules if bound is not None]
    return sorted(found, key=lambda bound: -(bound.low + bound.high))


def to_dict(bound: Verdict) -> dict[str, Any]:
    """For JSON; a bound has a name, not a cause."""
    document = bound.to_dict()
    return {"name": document.pop("cause"), **document}


def _batch(seen: Seen, num_kernels: int) -> Verdict | None:
    """``launch`` where twice the batch takes hardly longer, ``small_batch`` where clearly less than twice."""
    longer = seen.ratios("double_batch")  # of one batch's time to that of two: at most 1 if all were work
    if longer is None:
        return None
    low, middle, high = (1 / ratio for ratio in reversed(longer))
    if middle > CHEAP:
        return None
    gains = [seen.larger_batch(times) for times in (high, low)]
    evidence = (
        f"twice the batch takes forward and backward {middle:.2f} times as long: handing over {num_kernels} "
        f"operators takes the time, not their work"
        if middle <= FREE
        else f"twice the batch takes forward and backward only {middle:.2f} times as long"
    )
    advice = "a larger batch, if the job allows it"
    if middle <= FREE:
        advice += "; torch.compile or CUDA graphs" if seen.device == "cuda" else "; torch.compile"
    return Verdict(
        "launch" if middle <= FREE else "small_batch", evidence, gains[0] * 0.95, gains[1] * 1.05, advice
    )


def _update(seen: Seen) -> Verdict | None:
    """The optimizer takes a large part of the step; another implementation of it was tried on a copy."""
    share = seen.shares["update"]
    if share < LARGE_SHARE:
        return None
    name = (seen.record.get("optimizers") or ["the optimizer"])[0]
    evidence = f"{name}'s update is {words.percent(share)} of the step"
    ratios = seen.ratios("fused")
    low, high, advice = 1.0, 1 / (1 - share), "a larger batch, or accumulation: fewer updates a sample"
    if ratios is not None and ratios[1] >= CLEAR_GAIN:
        low, high = (1 / (1 - share + share / ratio) for ratio in (ratios[0], ratios[2]))
        evidence += f"; with fused=True a copy of it ran {words.times(ratios[1])} as fast"
        advice = f"{name}(..., fused=True)"
    return Verdict("optimizer", evidence, low, high, advice)


def _paging(seen: Seen) -> Verdict | None:
    """Blocks that are given back to the kernel after each step, and cleared anew in the next."""
    faults = seen.record.get("page_faults") or 0.0
    shares = [min(faults * seconds / seen.step_seconds, MOST_PAGING) for seconds in FAULT_SECONDS]
    if seen.device != "cpu" or shares[1] < LARGE_SHARE:
        return None
    evidence = (
        f"{faults:,.0f} page faults a step: memory is given back to the system and asked for again, "
        f"which takes {words.percent(shares[0])} to {words.percent(shares[1])} of the step"
    )
    low, high = (1 / (1 - share) for share in shares)
    return Verdict("paging", evidence, low, high, f"{seen.faster} tries host_allocator")


def _swapping(seen: Seen) -> Verdict | None:
    """Pages that come from the disk: the machine has too little memory, or a mapped file is read."""
    faults = seen.record.get("disk_faults") or 0.0
    if faults < 1:
        return None
    evidence = (
        f"{faults:.0f} times a step a page is read from disk: memory is short, or a file is mapped into it"
    )
    return Verdict("swapping", evidence, 1.0, 2.0, "a smaller batch, fewer workers, or more memory")
