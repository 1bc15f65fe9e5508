"""Rules about several ranks: they wait for each other, or read the same samples."""

from __future__ import annotations

import dataclasses

from vivace.profiling.seen import Seen, Verdict
from vivace.words import duration, percent

LARGE_WAIT = 0.15  # of the step
APART = 1.2
BATCHES = "give every rank batches of the same size"
OF_A_RANK = {  # what a rank does longer than another, by phase, and what to do about it
    "data": ("waiting for data", "give every rank the same loader and as many samples"),
    "place": ("copying batches to its device", BATCHES),
    "forward": ("in forward", BATCHES),
    "backward": ("in backward", BATCHES),
    "update": ("in the update", "let every rank update the same weights"),
    "idle": ("in its own code between an update and the next batch", "log and save once in many steps"),
}


def multi_gpu(seen: Seen) -> Verdict | None:
    """Several ranks that wait for each other, or read the same samples."""
    ranks = [seen.record, *(seen.record.get("other_ranks") or [])]
    facts = seen.record.get("ranks") or {}
    if "data_parallel" in (seen.record.get("asked") or {}):
        where = seen.short(seen.record["asked"]["data_parallel"])
        evidence = f"{where} uses DataParallel: one process feeds all GPUs, and copies the model each step"
        return Verdict("multi_gpu", evidence, 1.0, 2.0, "DistributedDataParallel under torchrun")
    if facts.get("world_size", 1) < 2:
        return None
    sums = [((r.get("ranks") or {}).get("batch_sum")) for r in ranks]
    world = facts["world_size"]
    if len(sums) > 1 and len(set(sums)) < len(sums) and None not in sums:
        evidence = f"ranks read the same batch ({facts['sampler']}): {world} processes do the work of one"
        return Verdict("multi_gpu", evidence, 1.0, float(world), "DistributedSampler(dataset), and set_epoch")
    late = straggler(seen)
    share = seen.shares["communication"]
    if late is not None:  # which itself waits for nobody
        share = max(
            share, *(r["seconds"]["communication"] / r["step_seconds"] for r in ranks if r.get("seconds"))
        )
    if share < LARGE_WAIT:
        return None
    evidence = f"{percent(share)} of the step is communication between {world} ranks that nothing hides"
    advice = "larger batches, accumulation with no_sync(), or fewer ranks"
    if late is not None:
        evidence += f"; {late.words}"
        advice = late.advice
    whole = seen.trace.get("collective_seconds", 0.0) * seen.stretch / seen.step_seconds
    most = min(
        0.8, max(share, whole if seen.device == "cpu" else 0.0)
    )  # on a CPU they take the cores as well
    if late is not None:
        most = max(most, min(0.8, late.seconds / seen.step_seconds))
    return Verdict("multi_gpu", evidence, 1.0, 1.1 / (1 - most), advice)


@dataclasses.dataclass(frozen=True)
class Straggler:
    """The rank that the others wait for: the seconds that it needs beyond the fastest, and where most."""

    phase: str
    seconds: float
    words: str
    advice: str


def straggler(seen: Seen) -> Straggler | None:
    """The slowest rank, where it needs a fifth more than the fastest apart from communication."""
    ranks = [r for r in (seen.record, *(seen.record.get("other_ranks") or [])) if r.get("seconds")]
    own = {i: r["step_seconds"] - r["seconds"]["communication"] for i, r in enumerate(ranks)}
    slow, fast = max(own, key=own.__getitem__), min(own, key=own.__getitem__)
    if own[fast] <= 0 or own[slow] < APART * own[fast]:
        return None
    more = {p: ranks[slow]["seconds"][p] - ranks[fast]["seconds"][p] for p in OF_A_RANK}
    phase = max(more, key=more.__getitem__)
    number = [(r.get("ranks") or {}).get("rank", i) for i, r in enumerate(ranks)]
    what, advice = OF_A_RANK[phase]
    words = f"rank {number[slow]} needs {own[slow] / own[fast]:.2f} times as long as rank {number[fast]}, "
    words += f"{duration(more[phase])} of it {what}"
    # Where ranks share cores, the others are slower for it too: the phase alone says more.
    return Straggler(
        phase, max(own[slow] - own[fast], more[phase]), words, f"{advice}, so that no rank waits for another"
    )
