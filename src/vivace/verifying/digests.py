"""What batches hold, as digests: short enough to keep whole epochs of them, and to hand them on."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any
from zlib import crc32

from vivace.data.order import tickets
from vivace.job import Job
from vivace.tensors.trees import Digest, digest, digest_beside_tensors
from vivace.verifying.feeding import LAST_BATCHES, Loaders, Reach, Read, has_index


@dataclasses.dataclass(frozen=True)
class Pass:
    """One pass over the data: of every batch a digest of each tensor, and one of all else that it holds;
    `whole` unless the time was up before its end.

    `is_stream`: the data have no index. Where they have one and the time was up, `last` are the digests of
    the last batches, and `order` holds a number for the indices of every batch.
    """

    batches: list[Digest]
    whole: bool
    is_stream: bool = False
    last: list[Digest] = dataclasses.field(default_factory=list)
    order: list[int] = dataclasses.field(default_factory=list)


def _digest(batch: Any) -> Digest:
    return (*digest(batch), digest_beside_tensors(batch))


def read(batches: Iterable[Any], seconds: float, least: int) -> Pass:
    """One pass, for about `seconds`, and at least `least` batches."""
    found: list[Digest] = []
    deadline = time.perf_counter() + seconds
    for batch in batches:
        if len(found) >= least and time.perf_counter() > deadline:
            return Pass(found, whole=False)
        found.append(_digest(batch))
    return Pass(found, whole=True)


def read_epochs(job: Job, field: str, num_epochs: int, reach: Reach) -> list[Pass]:
    """The first epochs of a Job's `data` or `validation`, in the order in which `train` feeds them, as far as
    `reach` allows.
    """
    passes, begin = [], time.perf_counter()
    loaders = Loaders(job, field)  # one, as in a training: what a dataset keeps of an epoch is in the next
    for epoch in range(num_epochs):
        loader = loaders.epoch(epoch)
        spent, further = time.perf_counter() - begin, num_epochs - 1 - epoch
        indexed = has_index(loader)
        found = read(loader, reach.of_pass(indexed, spent, further), least=8)
        if indexed and not found.whole:
            found = dataclasses.replace(found, **_unread(job, field, epoch))
        passes.append(dataclasses.replace(found, is_stream=not indexed))
    return passes


def _unread(job: Job, field: str, epoch: int) -> dict[str, Any]:
    """The end of an epoch and the order of all of it, as fields of its `Pass`."""
    loaders = Loaders(job, field)
    last = [_digest(batch) for batch in loaders.epoch(epoch, LAST_BATCHES)]
    order = tickets(Loaders(job, field).epoch(epoch))
    return {"last": last, "order": [crc32(repr(ticket).encode()) for ticket in order or ()]}


def compared(mine: Sequence[Pass], theirs: Sequence[Pass]) -> list[Read]:
    """How much of each pass both readings hold."""
    pairs = zip(mine, theirs, strict=True)
    return [Read(min(len(a.batches), len(b.batches)), a.whole and b.whole) for a, b in pairs]


def in_one_order(mine: Pass, theirs: Pass) -> bool:
    """Is the order of what was not read known to be the same?"""
    return bool(mine.order) and mine.order == theirs.order


def _other_order(mine: Pass, theirs: Pass) -> int | None:
    """The first batch of other samples behind what both have read; None where there is none, or where the
    same batches had other indices before: then these say nothing.
    """
    read = min(len(mine.batches), len(theirs.batches))
    if not (mine.order and theirs.order) or mine.order[:read] != theirs.order[:read]:
        return None
    pairs = zip_longest(mine.order, theirs.order)
    return next((number for number, (a, b) in enumerate(pairs) if a != b), None)


def first_other(mine: Sequence[Pass], theirs: Sequence[Pass], what: str) -> tuple[str, int]:
    """Where two readings part, as a sentence that ends with whose the second is, and the number of the batch;
    empty where they do not.

    What only one of them had the time to read is not compared.
    """
    for epoch, (ours, others) in enumerate(zip(mine, theirs, strict=True), 1):
        pairs = zip(ours.batches, others.batches, strict=False)
        for number, (a, b) in enumerate(pairs):
            if a != b:
                which = f"batch {number} of epoch {epoch} of the {what}"
                if len(a) != len(b):
                    return f"{which} holds {len(a) - 1} tensors, and {len(b) - 1}", number
                both = enumerate(zip(a[:-1], b[:-1], strict=True), 1)
                names = [str(i) for i, pair in both if pair[0] != pair[1]]
                if not names:
                    return f"{which} holds other numbers or texts beside its tensors than", number
                before = f"s {', '.join(names[:-1])} and" if len(names) > 1 else ""
                where = f"tensor{before} {names[-1]}"
                return f"{which} is another one, in its {where}, than", number
        counts = len(ours.batches), len(others.batches)
        shorter_is_whole = ours.whole if counts[0] < counts[1] else others.whole
        if counts[0] != counts[1] and shorter_is_whole:
            return f"epoch {epoch} of the {what} has {counts[0]} batches, and {counts[1]}", min(counts)
        if (other := _other_order(ours, others)) is not None:
            return (
                f"batch {other} of epoch {epoch} of the {what} has other samples, or in another order, than",
                other,
            )
        if ours.last and others.last and ours.last != others.last:
            return f"epoch {epoch} of the {what} ends with other batches than", max(counts)
    return "", 0
