"""Are the batches that a plan feeds, to the training and to the metric, those of the job's own loader?"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from vivace.data.damage import Damage
from vivace.data.order import isolated, ordered, share_of
from vivace.job import Batch, Job
from vivace.session.opening import call
from vivace.session.session import Session
from vivace.tensors.randomness import derive
from vivace.tensors.trees import tensors

EPOCHS = 3  # what is recorded in one and replayed in the next shows in the third
LEAST_BATCHES = 3
LAST_BATCHES = 3  # compared too where there is no time for a whole epoch


class Loaders:
    """The data of a Job, epoch by epoch in the order in which `train` feeds them: one loader, moved on.

    Of several ranks, the share of one.
    """

    def __init__(self, job: Job, field: str = "data", rank: int = 0, world_size: int = 1) -> None:
        self.job, self.field = job, field
        self.rank, self.world_size = rank, world_size
        self.loader: Any = None

    def epoch(self, number: int, last: int | None = None) -> Iterable[Any]:
        """One epoch; only its `last` batches where that is asked for and the data have an index."""
        if self.loader is None or not isinstance(self.loader, DataLoader):
            self.loader = call(self.job, self.field)  # what is no DataLoader may live for one pass
        mine: dict[str, Any] = {"rank": self.rank, "world_size": self.world_size}
        found = ordered(self.loader, seed=0, epoch=number, damage=Damage.of(self.job), **mine)
        known = _length(found)
        if last is not None and known is not None and isinstance(found, DataLoader):
            found = ordered(found, seed=0, epoch=number, start_batch=max(0, known - last), **mine)
        self.loader = found if isinstance(found, DataLoader) else self.loader
        return found

    @property
    def has_index(self) -> bool:
        """Can the last batches be read without the others?"""
        return isinstance(self.loader, DataLoader) and _length(self.loader) is not None


class Fed(NamedTuple):
    """What is wrong with the batches that a plan feeds, and what of them could not be compared; or empty."""

    fault: str = ""
    note: str = ""


def shared_otherwise(job: Job, rank: int, world_size: int) -> Fed:
    """How a rank's share of the first batches is not its part of the batches that one process gets."""
    if world_size == 1:
        return Fed()
    shares, batches = Loaders(job, "data", rank, world_size).epoch(0), Loaders(job).epoch(0)
    for share, batch in itertools.islice(zip(shares, batches, strict=False), LEAST_BATCHES):
        if share is None or batch is None:
            continue
        part = share_of(batch, rank, world_size)
        if [t.shape for t in tensors(share)] != [t.shape for t in tensors(part)]:
            return Fed(f"rank {rank} is not fed its share of what one process is fed")
        if not _equal(share, part):
            return Fed(note="each rank draws random numbers of its own while it reads its samples")
    return Fed()


def fed_otherwise(session: Session, job: Job, seconds: float, rank: int = 0, world_size: int = 1) -> Fed:
    """How three epochs come otherwise than `train` would feed them, as far as `seconds` for each reach, and
    how they end; of several ranks, to one.

    What travels in another form is compared as the step gets it: both batches placed by the session.
    Nothing is read where no technique touches the batches.
    """
    note = ""
    theirs, own = (Loaders(job, "data", rank, world_size) for _ in range(2))
    for epoch in range(EPOCHS):
        loader = theirs.epoch(epoch)
        fed = session.seams.batches(loader)
        if fed is loader:
            return Fed()
        alike, whole = _alike(session, fed, own.epoch(epoch), seconds)
        if not whole:
            ends = f" and the last {LAST_BATCHES} batches" if own.has_index else ""
            note = f"of each epoch's data, what {seconds:.3g} s reach{ends} were compared"
        if alike and not whole and own.has_index:
            ending = session.seams.batches(theirs.epoch(epoch, LAST_BATCHES))
            alike, _ = _alike(session, ending, own.epoch(epoch, LAST_BATCHES), seconds)
        if not alike:
            again = Loaders(job, "data", rank, world_size)
            if not _alike(session, own.epoch(epoch), again.epoch(epoch), seconds)[0]:
                return Fed(
                    "your data come otherwise each time that they are read: their shuffle needs a seed"
                )
            return Fed(f"it feeds other batches, or in another order, in epoch {epoch + 1}")
    return Fed(note=note)


def validated_otherwise(session: Session, job: Job, seconds: float) -> Fed:
    """How the metric is fed otherwise than by the job's own loader, in two evaluations."""
    note = ""
    if job.metric is None:
        return Fed()
    field = "validation" if job.validation is not None else "data"
    theirs, own = Loaders(job, field), Loaders(job, field)
    for number in ("first", "second"):
        loader = theirs.epoch(0)

        def fed(loader: Iterable[Batch] = loader) -> Any:
            return session.validation(loader)

        if fed() is loader:
            return Fed()
        pairs = isolated(fed, derive(0, "validation")), own.epoch(0)
        alike, whole = _alike(session, *pairs, seconds)
        if not alike:
            return Fed(f"its {number} evaluation gets other batches than the job's {field}")
        if not whole:
            note = f"of what the metric reads, as much as {seconds:.3g} s reach was compared"
    return Fed(note=note)


def _alike(session: Session, fed: Iterable[Any], own: Iterable[Any], seconds: float) -> tuple[bool, bool]:
    """Are they equal, as far as they were read, and was that the whole?"""
    missing, deadline = object(), time.perf_counter() + seconds
    pairs: Iterator[Any] = itertools.zip_longest(iter(fed), iter(own), fillvalue=missing)
    for number, (mine, theirs) in enumerate(pairs):
        if number >= LEAST_BATCHES and time.perf_counter() > deadline:
            known = _length(fed), _length(own)
            return None in known or known[0] == known[1], False
        if mine is missing or theirs is missing:
            return False, True
        if not _equal(mine, theirs) and not _equal(session.place(mine), session.place(theirs)):
            return False, True
    return True, True


def _equal(mine: object, theirs: object) -> bool:
    a, b = list(tensors(mine)), list(tensors(theirs))
    return len(a) == len(b) and all(torch.equal(x.cpu(), y.cpu()) for x, y in zip(a, b, strict=True))


def _length(batches: object) -> int | None:
    try:
        return len(batches)  # type: ignore[arg-type]
    except TypeError:
        return None
