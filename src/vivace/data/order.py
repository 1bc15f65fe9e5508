"""Exact data order: batch k of epoch e holds the same samples and the same random augmentation, for any
number of worker processes and after any interruption.

The order is a function of (seed, epoch); the randomness inside a batch is a function of (seed, epoch, batch,
rank). Nothing here draws from the main random streams, and nothing that the training draws reaches the data.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    get_worker_info,
)

from vivace.data.damage import Damage, path_of
from vivace.data.iterable import IterableData, Place
from vivace.data.witness import Witness
from vivace.errors import JobError
from vivace.job import Batch, Job
from vivace.tensors.loaders import CollatingDataset, known_length
from vivace.tensors.randomness import SeededStreams, Streams, derive
from vivace.tensors.trees import batch_size, split
from vivace.torch_internals.loaders import iterates_itself

_MARKS = 4096  # of the last batches: what workers fetch ahead lies within
_SHOULD = "a sampler of your own should draw its order from what set_epoch tells it"


def ordered(
    loader: Iterable[Any],
    *,
    seed: int,
    epoch: int,
    start_batch: int = 0,
    rank: int = 0,
    world_size: int = 1,
    damage: Damage | None = None,
    place: Place | None = None,
    renew: Callable[[], Any] | None = None,
    witness: Witness | None = None,
) -> Iterable[Any]:
    """One epoch of `loader` from batch `start_batch` on, in an order that depends on `seed` and `epoch`.

    A DataLoader over a map-style dataset comes back as a DataLoader that loads none of the skipped samples;
    given back in, it is moved to the new epoch, so that persistent workers live on, but for a dataset that is
    told the epoch. Anything else iterable comes back as `IterableData`, to which `place` and `renew` go. Of
    `world_size` ranks each takes its contiguous share of every batch. What cannot be read is treated as
    `damage` says; a batch of which nothing is left comes as None.

    Raises JobError where a batch cannot be shared evenly.
    """
    if not _rebuildable(loader):
        share = partial(share_of, rank=rank, world_size=world_size)
        return IterableData(loader, derive(seed, epoch), epoch, start_batch, share, place, renew)
    assert isinstance(loader, DataLoader)
    order = loader.batch_sampler
    if not isinstance(order, PassOrder):
        order = PassOrder(loader, seed, rank, world_size)
        loader = _rebuild(loader, order, damage or Damage(), witness)
    order.begin(epoch, start_batch, place)
    rebuilt: Any = loader.dataset
    if hasattr(rebuilt.dataset, "set_epoch"):
        rebuilt.dataset.set_epoch(epoch)
    loader.generator.manual_seed(derive(seed, epoch, "workers"))
    return loader


def tickets(loader: Iterable[Any]) -> Iterator[list[Any]] | None:
    """Of each batch of an epoch, as `ordered` gave it, its seed and the indices of its samples, of which none
    is loaded; None where the data have no index.
    """
    order = order_of(loader)
    return None if order is None else iter(order)


def order_of(loader: Iterable[Any]) -> PassOrder | None:
    """The order of an epoch, as `ordered` gave it; None where the data have no index."""
    order = loader.batch_sampler if isinstance(loader, DataLoader) else None
    return order if isinstance(order, PassOrder) else None


def splits_by_rank(loader: Iterable[Any]) -> bool:
    """Has the loader a sampler that gives each rank a part of the samples?"""
    batches = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    return any(isinstance(one, DistributedSampler) and one.num_replicas > 1 for one in samplers)


def require_index(loader: Iterable[Any], job: Job) -> None:
    """Raises JobError where the data cannot be read as a Job's `damaged` and `checksums` need it."""
    kind = type(getattr(loader, "dataset", loader)).__name__
    if job.damaged != "raise" and not _rebuildable(loader):
        raise JobError(
            f"damaged='{job.damaged}' needs a DataLoader over data with an index; your {kind} ends at a "
            "sample that cannot be read, unless it passes over such samples itself"
        )
    if job.checksums is None:
        return
    if not _rebuildable(loader) or not path_of(getattr(loader, "dataset", None), 0):
        raise JobError(
            f"checksums need a DataLoader over data that list their files, as ImageFolder does; your {kind} "
            "does not: leave checksums out"
        )


def _rebuildable(loader: Iterable[Any]) -> bool:
    """Is it a DataLoader over map-style data, or torchdata's, which takes the same arguments?"""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    reads: Any = type(loader).__iter__
    return not iterates_itself(loader) or reads.__module__.startswith("torchdata.stateful_dataloader")


def _rebuild(
    loader: DataLoader[Any], order: PassOrder, damage: Damage, witness: Witness | None
) -> DataLoader[Any]:
    if damage.policy == "skip" and order.world_size > 1:
        raise JobError(
            f"damaged='skip' would leave {order.world_size} ranks with unequal batches: choose 'replace'"
        )
    dataset = SeededDataset(
        loader.dataset, loader.collate_fn, order.batches is None, order.rank, order.world_size, damage
    )
    if loader.num_workers and not loader.in_order:
        order.notices.append(
            "the loader's batches come in order, though it has in_order=False: a stopped run could not go on"
        )
    methods = loader.multiprocessing_context or multiprocessing.get_context()
    shared = not loader.num_workers or methods.get_start_method() == "fork"  # memory, with the workers
    told = hasattr(loader.dataset, "set_epoch")  # its first batch is another one in another epoch
    looks = shared and not told
    if witness is not None and not witness.mark and looks and (first := order.first_ticket()) is not None:
        dataset.first = (witness, first)
    return DataLoader(
        dataset,
        batch_sampler=order,
        num_workers=loader.num_workers,
        collate_fn=_as_it_is,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=_WorkerStart(loader.worker_init_fn),
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator(),
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers and not told,  # those that live on never hear it
        pin_memory_device=loader.pin_memory_device,
    )


class SeededDataset(CollatingDataset):
    """A dataset that loads and collates a whole batch under random streams of its own.

    `dataset` is the person's own; `collate` makes a batch of its samples. With `single`, one index is a whole
    batch already, of which rank `rank` of `world_size` keeps its share. `damage` reads the samples.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[Any], Any],
        single: bool,
        rank: int,
        world_size: int,
        damage: Damage,
    ) -> None:
        self.dataset = dataset
        self.collate = collate
        self.single = single
        self.rank, self.world_size = rank, world_size
        self.damage = damage
        self.first: tuple[Witness, list[Any]] | None = None  # who looks at the first batch, and its ticket
        self._streams = SeededStreams(0)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: object) -> Any:
        """One sample, as the person's dataset gives it."""
        return self.dataset[index]

    def __getitems__(self, ticket: list[Any]) -> Any:
        """The collated batch of a ticket: the batch's seed, then the indices of its samples."""
        if get_worker_info() is not None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process to answer
        if self.first is None:
            return self._read(ticket, self.damage)
        (witness, first), self.first = self.first, None
        if ticket != first:
            unlisted = Damage(self.damage.policy, checksums=self.damage.checksums)
            witness.look(lambda: self._read(first, unlisted))
            return self._read(ticket, self.damage)
        batch = self._read(ticket, self.damage)
        witness.look(lambda: batch)
        return batch

    def _read(self, ticket: list[Any], damage: Damage) -> Any:
        seed, *indices = ticket
        self._streams.seed = seed
        with self._streams:
            samples = damage.read(self.dataset, indices, seed, many=not self.single)
            if isinstance(samples, list) and not samples:
                return None
            if self.single:
                return share_of(self.collate(samples[0]), self.rank, self.world_size)
            return self.collate(samples)


class PassOrder(Sampler[list[Any]]):
    """The batch sampler: tickets of one epoch, from one batch on. `begin` moves it to another epoch.

    The order of a sampler of the person's own is marked, batch after batch. `notices` says where it did not
    come as before a stop.
    """

    def __init__(self, loader: DataLoader[Any], seed: int, rank: int, world_size: int) -> None:
        self.batches = loader.batch_sampler
        self.sampler = getattr(self.batches, "sampler", loader.sampler)
        self.num_samples = known_length(loader.dataset)
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.epoch = self.start_batch = 0
        self.notices: list[str] = []
        self._wanted = ""
        self._passed = 0  # batches of the pass before a stop, where that pass had ended
        self._marks: deque[tuple[int, str]] = deque(maxlen=_MARKS)
        if world_size > 1 and splits_by_rank(loader):
            raise JobError(
                "the data's DistributedSampler splits the samples between the ranks, and Vivace splits "
                "every batch itself: build the DataLoader with shuffle=True instead of the sampler"
            )
        if self.batches is not None and world_size > 1 and type(self.batches) is BatchSampler:
            _share(list(range(self.batches.batch_size)), rank, world_size)
            whole = known_length(self.sampler)
            if whole is not None and not self.batches.drop_last:
                _share(list(range(whole % self.batches.batch_size)), rank, world_size)

    def begin(self, epoch: int, start_batch: int, place: Place | None = None) -> None:
        """Let the next pass be that of `epoch`, from `start_batch` on; `place` was kept before a stop."""
        self.epoch, self.start_batch = epoch, start_batch
        fits = place is not None and (place.get("epoch"), place.get("batch")) == (epoch, start_batch)
        given = place if place is not None and fits else {}
        self._wanted, self._passed = given.get("order", ""), given.get("passed", 0)

    def place(self, batch: int) -> Place:
        """What a checkpoint keeps of the order up to `batch`; empty where that is a function of the seed."""
        mark = dict(self._marks).get(batch)
        return {"epoch": self.epoch, "batch": batch, "order": mark} if mark else {}

    def place_behind(self) -> Place:
        """The same where this pass has ended, and the next has not begun."""
        number, mark = self._marks[-1] if self._marks else (0, "")
        return {"epoch": self.epoch + 1, "batch": 0, "order": mark, "passed": number} if mark else {}

    def __len__(self) -> int:
        whole: Any = self.sampler if self.batches is None else self.batches
        return max(0, len(whole) - self.start_batch)

    def __iter__(self) -> Iterator[list[Any]]:
        for position, indices in enumerate(self._indices(), self.start_batch):
            share = indices
            if self.batches is not None:
                share = _share(indices, self.rank, self.world_size)
            yield [derive(self.seed, self.epoch, position, self.rank), *share]

    def first_ticket(self) -> list[Any] | None:
        """That of the first batch of all, where it can be known without drawing from the person's sampler."""
        known = self._known_order(derive(self.seed, 0))
        if known is None:
            return None
        whole = list(known[: 1 if self.batches is None else self.batches.batch_size])  # type: ignore[attr-defined]
        share = whole if self.batches is None else _share(whole, self.rank, self.world_size)
        return [derive(self.seed, 0, 0, self.rank), *share]

    def told_by(self) -> tuple[Any, ...] | None:
        """All that the pass of this epoch depends on, where the person's sampler is one of torch's two plain
        ones: equal where two passes are. None for other samplers.
        """
        if not self._is_plain():
            return None
        cut = (getattr(self.batches, "batch_size", None), getattr(self.batches, "drop_last", None))
        share = (self.rank, self.world_size)
        return (type(self.sampler), self.num_samples, self.seed, self.epoch, self.start_batch, cut, share)

    def _indices(self) -> Iterator[list[Any]]:
        """The whole batches of indices, skipped forward."""
        known = self._known_order(derive(self.seed, self.epoch))
        if known is None:
            return self._behind(self._person_order(self.epoch))
        size = 1 if self.batches is None else self.batches.batch_size  # type: ignore[attr-defined]
        whole = self.batches is not None and self.batches.drop_last  # type: ignore[attr-defined]
        end = len(known) - len(known) % size if whole else len(known)
        return (list(known[i : min(i + size, end)]) for i in range(self.start_batch * size, end, size))

    def _behind(self, batches: Iterator[list[Any]]) -> Iterator[list[Any]]:
        """Those from the start on; the marks tell whether what comes before it came again."""
        self._ask_again()
        number, mark = 0, ""
        self._marks.clear()
        for number, batch in enumerate(batches, 1):
            mark = _marked(mark, batch)
            self._marks.append((number, mark))
            if number > self.start_batch:
                yield batch
            elif number == self.start_batch:
                self._require(mark)
        if number < self.start_batch:
            self._require("")

    def _require(self, mark: str) -> None:
        if self._wanted and mark != self._wanted:
            self.notices.append(
                f"resumed, not bit-exact: up to batch {self.start_batch} of epoch {self.epoch + 1} the "
                "sampler gave another order than before the stop: this epoch sees some samples twice and "
                f"others never; {_SHOULD}"
            )

    def _ask_again(self) -> None:
        """The sampler gives once more the pass before a stop: as before, where this one is to follow it."""
        passed, self._passed = self._passed, 0
        if not passed:
            return
        mark, batches = "", self._person_order(self.epoch - 1)
        for batch in islice(batches, passed):
            mark = _marked(mark, batch)
        next(batches, None)  # it may count its passes when they end
        if mark != self._wanted:
            self.notices.append(
                f"resumed, not bit-exact: asked again for the order of epoch {self.epoch}, the sampler gave "
                f"another one than before the stop; {_SHOULD}"
            )

    def _is_plain(self) -> bool:
        """Is the person's sampler one of torch's two plain ones, whose order is a function of the seed?"""
        sampler, size = self.sampler, self.num_samples
        if size is None or (self.batches is not None and type(self.batches) is not BatchSampler):
            return False
        if type(sampler) is SequentialSampler:
            return len(sampler) == size
        return type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == size

    def _known_order(self, seed: int) -> list[int] | range | None:
        """All indices of the epoch where the person's sampler is a plain one, else None."""
        if not self._is_plain():
            return None
        assert self.num_samples is not None
        if type(self.sampler) is SequentialSampler:
            return range(self.num_samples)
        generator = torch.Generator().manual_seed(seed)
        return list(torch.randperm(self.num_samples, generator=generator, device="cpu").tolist())

    def _person_order(self, epoch: int) -> Iterator[list[Any]]:
        """The batches of the person's own sampler, drawn from streams seeded for the epoch."""
        seed = derive(self.seed, epoch)
        owner: Any
        for owner in (self.sampler, self.batches):
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)
        source: Iterable[Any] = self.sampler if self.batches is None else self.batches
        for batch in isolated(lambda: source, seed):
            yield [batch] if self.batches is None else list(batch)


class _WorkerStart:
    """How a worker process starts: the person's `worker_init_fn`, then a look whether anybody still waits.

    The person's function finds the person's own dataset in `get_worker_info`. torch's own look at the parent
    begins after this: a worker whose parent was killed before would wait for its first index for ever.
    """

    def __init__(self, person: Callable[[int], Any] | None) -> None:
        self.person = person

    def __bool__(self) -> bool:
        return self.person is not None  # for those who ask whether the person has one

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, SeededDataset):
            object.__setattr__(info, "dataset", info.dataset.dataset)  # WorkerInfo forbids plain assignment
        if self.person is not None:
            self.person(worker)
        parent = multiprocessing.parent_process()
        served = isinstance(multiprocessing.current_process(), multiprocessing.context.ForkServerProcess)
        if parent is not None and not served and os.getppid() != parent.pid:
            os._exit(0)


def isolated(source: Callable[[], Iterable[Any]], seed: int) -> Iterator[Any]:
    """The items of ``source()``, each drawn under streams that start at `seed` and are its own."""
    streams = Streams(seed)
    with streams:
        iterator = iter(source())
    while True:
        with streams:
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


def _marked(before: str, indices: list[Any]) -> str:
    """A mark of all batches so far; empty where indices are no numbers or texts."""
    try:
        text = json.dumps([before, indices], default=int)
    except (TypeError, ValueError):
        return ""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _share(indices: list[Any], rank: int, world_size: int) -> list[Any]:
    """The contiguous share of one rank. Raises JobError where the batch cannot be cut into equal shares."""
    if len(indices) % world_size:
        raise JobError(
            f"a batch of {len(indices)} samples cannot be shared by {world_size} ranks: choose a batch size "
            f"that is a multiple of {world_size} and drop_last=True"
        )
    size = len(indices) // world_size
    return indices[rank * size : (rank + 1) * size]


def share_of(batch: Batch, rank: int, world_size: int) -> Any:
    """One rank's share of a loaded batch. Raises JobError where it cannot be shared evenly."""
    if world_size == 1:
        return batch
    return split(batch, len(_share(list(range(batch_size(batch))), rank, world_size)))[rank]


def _as_it_is(batch: Batch) -> Any:
    return batch
