"""Are the batches that a plan feeds, to the training and to the metric, those of the job's own loader?"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from vivace import words
from vivace.data.damage import Damage
from vivace.data.iterable import IterableData
from vivace.data.order import isolated, ordered, share_of
from vivace.job import Batch, Job
from vivace.session.opening import call
from vivace.session.session import Session
from vivace.tensors.loaders import known_length
from vivace.tensors.randomness import derive
from vivace.tensors.trees import digest_beside_tensors, map_tensors, same_numbers, tensors

EPOCHS = 3  # a plan that records one epoch and replays it in the next differs in the third
LEAST_BATCHES = 3
EVALUATIONS = 2
LAST_BATCHES = 3  # compared too where there is no time for a whole epoch


class Loaders:
    """The data of a Job, epoch by epoch in the order in which `train` feeds them: one loader, moved on.

    Of several ranks, the share of one.
    """

    def __init__(self, job: Job, field: str = "data", rank: int = 0, world_size: int = 1) -> None:
        self.job, self.field = job, field
        self.rank, self.world_size = rank, world_size
        self.loader: Any = None
        self.has_index = False  # of the last epoch given: can its end be read without the rest?

    def epoch(self, number: int, last: int | None = None) -> Iterable[Any]:
        """One epoch; only its `last` batches where that is asked for and the data have an index."""
        if self.loader is None or not isinstance(self.loader, DataLoader):
            self.loader = call(self.job, self.field)  # what is no DataLoader may live for one pass
        mine: dict[str, Any] = {"rank": self.rank, "world_size": self.world_size}
        found = ordered(self.loader, seed=0, epoch=number, damage=Damage.of(self.job), **mine)
        known = known_length(found)
        if last is not None and known is not None and isinstance(found, DataLoader):
            found = ordered(found, seed=0, epoch=number, start_batch=max(0, known - last), **mine)
        self.loader = found if isinstance(found, DataLoader) else self.loader
        self.has_index = has_index(found)
        return found

    def ending(self, number: int, last: int, batches: Sequence[Any]) -> tuple[Iterable[Any], bool]:
        """A pass over the `last` batches of an epoch alone, and does it end behind them?

        It is the job's own loader; or of a stream, whose end cannot be read without the rest, one that holds
        copies of `batches`. What is neither begins with the epoch and goes on to its end.
        """
        found = self.epoch(number, last)
        if isinstance(found, IterableData):
            return Ending(found, batches), True
        return found, self.has_index


class Ending(IterableData):
    """A pass over a stream that consists of these `batches`; to what looks at it, it is the stream."""

    def __init__(self, whole: IterableData, batches: Sequence[Any]) -> None:
        super().__init__(whole.source, whole.seed, whole.epoch, share=whole.share)
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter([map_tensors(batch, torch.Tensor.clone) for batch in self.batches])


def has_index(loader: Any) -> bool:
    """Has an epoch's loader, as `ordered` gives it, a length, and can its end be read without the rest?"""
    return isinstance(loader, DataLoader) and known_length(loader) is not None


class Reach(NamedTuple):
    """For how many seconds data are compared: `each` pass over what has an index, whose end can be read
    without the rest; all passes over a `stream` together, the first as long as the others can spare.
    """

    each: float
    stream: float

    def of_pass(self, has_index: bool, spent: float, further: int) -> float:
        """Of one pass, where those before it took `spent` and `further` follow."""
        return self.each if has_index else max(self.each, self.stream - spent - further * self.each)


class Read(NamedTuple):
    """How much of one pass was compared: its first batches, and were these all?"""

    batches: int
    whole: bool

    def to_dict(self) -> dict[str, Any]:
        """As in a verdict's document."""
        return {"batches": self.batches, "whole": self.whole}


class Fed(NamedTuple):
    """What is wrong with the batches that a plan feeds, and what of them could not be compared; or empty.

    `read`: how much of each pass was compared; nothing where no technique touches the batches. `ends`: of
    each pass over a stream the last batches, none where its end was not reached.
    """

    fault: str = ""
    note: str = ""
    read: tuple[Read, ...] = ()
    ends: tuple[Sequence[Any], ...] = ()


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


def fed_otherwise(session: Session, job: Job, reach: Reach, rank: int = 0, world_size: int = 1) -> Fed:
    """How three epochs come otherwise than `train` would feed them, as far as `reach` allows, and how they
    end; of several ranks, to one.

    What travels in another form is compared as the step gets it: both batches placed by the session.
    Nothing is read where no technique touches the batches.
    """
    read, ends = list[Read](), list[Sequence[Any]]()
    theirs, own = (Loaders(job, "data", rank, world_size) for _ in range(2))
    begin, seconds = time.perf_counter(), 0.0
    for epoch in range(EPOCHS):
        loader = theirs.epoch(epoch)
        fed = session.seams.batches(loader)
        if fed is loader:
            return Fed()
        mine, spent = own.epoch(epoch), time.perf_counter() - begin
        seconds = reach.of_pass(own.has_index, spent, EPOCHS - 1 - epoch)
        last = deque[Any](maxlen=LAST_BATCHES)
        alike, found = _alike(session, fed, mine, seconds, last)
        read.append(found)
        ends.append(last if found.whole and isinstance(mine, IterableData) else [])
        where = f"in epoch {epoch + 1}, from batch {found.batches + 1} on"
        if alike and not found.whole and own.has_index:
            where = f"at the end of epoch {epoch + 1}"
            ending = session.seams.batches(theirs.epoch(epoch, LAST_BATCHES))
            alike, _ = _alike(session, ending, own.epoch(epoch, LAST_BATCHES), seconds)
        if not alike:
            one, other = (Loaders(job, "data", rank, world_size).epoch(epoch) for _ in range(2))
            if not _alike(session, one, other, seconds)[0]:
                return Fed(
                    "your data come otherwise each time that they are read: their shuffle needs a seed"
                )
            return Fed(f"it feeds other batches, or in another order, {where}")
    limit = limit_of(own.has_index, reach.each if own.has_index else time.perf_counter() - begin)
    limit += f", and the last {LAST_BATCHES}" if own.has_index else ""
    return Fed(note=unread("data", "epoch", read, limit), read=tuple(read), ends=tuple(ends))


def validated_otherwise(session: Session, job: Job, reach: Reach) -> Fed:
    """How the metric is fed otherwise than by the job's own loader, in two evaluations."""
    if job.metric is None:
        return Fed()
    field = "validation" if job.validation is not None else "data"
    theirs, own = Loaders(job, field), Loaders(job, field)
    read: list[Read] = []
    begin = time.perf_counter()
    for number in range(EVALUATIONS):
        loader = theirs.epoch(0)

        def fed(loader: Iterable[Batch] = loader) -> Any:
            return session.validation(loader)

        if fed() is loader:
            return Fed()
        mine, spent = own.epoch(0), time.perf_counter() - begin
        seconds = reach.of_pass(own.has_index, spent, EVALUATIONS - 1 - number)
        alike, found = _alike(session, isolated(fed, derive(0, "validation")), mine, seconds)
        read.append(found)
        if not alike:
            which = ("first", "second")[number]
            return Fed(f"its {which} evaluation gets other batches than the job's {field}")
    limit = limit_of(own.has_index, reach.each if own.has_index else time.perf_counter() - begin)
    note = unread(f"{field} that the metric reads", "evaluation", read, limit)
    return Fed(note=note, read=tuple(read))


def unread(what: str, which: str, read: Sequence[Read], limit: str) -> str:
    """How much of each pass over `what` was compared, and the `limit` to it; empty where all of it was."""
    if all(one.whole for one in read):
        return ""
    told = [f"{words.number(one.batches)} of {which} {i}" for i, one in enumerate(read, 1)]
    told = [text + " (all)" if one.whole else text for text, one in zip(told, read, strict=True)]
    return f"of the {what} the first batches were compared ({', '.join(told)}), {limit}"


def limit_of(has_index: bool, seconds: float) -> str:
    """Why no more was compared: `seconds` of each pass over what has an index, of all over a stream."""
    took = words.duration(max(1.0, round(seconds)))
    return f"what came in {took}" + (" of each" if has_index else ": a stream, whose end was not reached")


def _alike(
    session: Session,
    fed: Iterable[Any],
    own: Iterable[Any],
    seconds: float,
    last: deque[Any] | None = None,
) -> tuple[bool, Read]:
    """Are they equal, as far as they were read? How many were? The job's own go to `last`."""
    missing, deadline = object(), time.perf_counter() + seconds
    pairs: Iterator[Any] = itertools.zip_longest(iter(fed), iter(own), fillvalue=missing)
    number = 0
    for mine, theirs in pairs:
        if number >= LEAST_BATCHES and time.perf_counter() > deadline:
            known = known_length(fed), known_length(own)
            return None in known or known[0] == known[1], Read(number, whole=False)
        if mine is missing or theirs is missing:
            return False, Read(number, whole=True)
        if not _equal(mine, theirs) and not _equal(session.place(mine), session.place(theirs)):
            return False, Read(number, whole=True)
        number += 1
        if last is not None and theirs is not None:
            last.append(theirs)
    return True, Read(number, whole=True)


def _equal(mine: object, theirs: object) -> bool:
    a, b = list(tensors(mine)), list(tensors(theirs))
    alike = len(a) == len(b) and digest_beside_tensors(mine) == digest_beside_tensors(theirs)
    return alike and all(same_numbers(x.cpu(), y.cpu()) for x, y in zip(a, b, strict=True))
