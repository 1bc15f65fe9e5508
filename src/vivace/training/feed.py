"""The batches of one run: in order, from any place on, whatever befalls the loader's workers."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset

from vivace.blame import blame
from vivace.data.damage import Damage
from vivace.data.hanging import HangWatch
from vivace.data.iterable import IterableData, Place, first_mark
from vivace.data.order import PassOrder, order_of, ordered, require_index
from vivace.data.witness import Witness
from vivace.errors import (
    JobError,
    NoPageLockedMemory,
    OutOfMemory,
    VivaceError,
    is_lost_worker,
    is_no_shared_memory,
    is_of_pinning_thread,
    ran_out_of_memory,
)
from vivace.inspection.limits import LITTLE_SHARED_MEMORY, little_shared_memory, shared_memory
from vivace.job import Job
from vivace.session.opening import call, fed
from vivace.session.session import Session
from vivace.tensors.loaders import known_length
from vivace.tensors.randomness import Streams, derive
from vivace.torch_internals.loaders import end_workers_of, forget_workers, while_page_locking
from vivace.training.checkpoints import Position
from vivace.training.losses import WorkerWatch
from vivace.training.ranks import Ranks

DAMAGED = "damaged.jsonl"
_KILLED = "a worker of the loader was killed"
_READERS = ("torch", "torchvision", "numpy", "pillow")


class Feed:
    """Reads the Job's data for a run. While entered, workers that die or hang are noticed.

    Args:
        job, ranks, seed: of the run.
        path: the run folder, where damaged samples are listed; None: nowhere.
        notice: ``(sentence) -> None``, for the person.
        changed: may the data be others than those of the run that this one continues?
    """

    def __init__(
        self,
        job: Job,
        ranks: Ranks,
        seed: int,
        path: Path | None,
        notice: Callable[[str], None],
        *,
        changed: bool = False,
    ) -> None:
        self.job, self.ranks, self.seed, self.notice = job, ranks, seed, notice
        self._changed = changed
        self.witness = Witness()
        self.damage = Damage.of(job, path and path / DAMAGED)
        self.workers, self.hangs = WorkerWatch(), HangWatch(notice)
        self.damage.reading = self.hangs.board.write
        with Streams(derive(seed, "data")):
            self.own_loader = call(job, "data")
        require_index(self.own_loader, job)
        self.loader = self.own_loader
        self.place: Place | None = None  # where a stream stood when it was left
        self.let_go: Callable[[], None] = lambda: None  # of the workers of other loaders: one may be the dead
        self._pass: IterableData | PassOrder | None = None
        self._asked = self._compared = False
        self._read_under: list[str] = []  # the facts under which the first batch was marked

    def __enter__(self) -> Feed:
        self.workers.__enter__()
        self.hangs.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.hangs.__exit__()
        self.workers.__exit__()

    def batches(self, session: Session, position: Position) -> Generator[Any, None, None]:
        """The rest of the epoch's batches; the loader is made anew where its workers are killed, and where a
        connection of the data broke.
        """
        while broke := (yield from self._until_it_breaks(session, position)):
            where = _where(position)
            self.forget()
            hung = self.hangs.found_in(self.own_loader)
            if not self.workers.may_try_again(where):
                why = "too little memory, or a sample that crashes its reader (try num_workers=0)"
                why = (
                    f"the last one {hung}"
                    if hung
                    else "; or ".join(filter(None, (why, _little_shared_memory())))
                )
                again = f"workers of the loader were killed again and again; {why}"
                raise JobError(f"the data failed at {where}: {again if broke == _KILLED else broke}")
            if broke != _KILLED:
                self.notice(f"the data failed at {where}, and are read again from there: {broke}")
                continue
            how = f"a worker of the loader {hung}, at {where}" if hung else f"{_KILLED} before {where}"
            self.notice(f"{how}: it was replaced")

    def forget(self) -> None:
        """Begin with new workers, and with what the plan's techniques then make of the loader anew."""
        self.loader = self.own_loader
        forget_workers(self.loader)
        self.let_go()

    def num_batches_in(self, step: int, most: int) -> int:
        """The batches in the `step`-th step of an epoch, of at most `most`; the last may take fewer."""
        length = known_length(self.own_loader)
        return most if length is None else max(1, min(most, length - (step - 1) * most))

    @property
    def counts(self) -> bool:
        """Is the data's length the number of their batches? Of a stream that workers share torch guesses it,
        and is wrong by what each worker leaves over.
        """
        streams = isinstance(getattr(self.own_loader, "dataset", None), IterableDataset)
        shared = streams and getattr(self.own_loader, "num_workers", 0) > 1
        return known_length(self.own_loader) is not None and not shared

    def num_missing(self, batches: int, most: int) -> int:
        """Steps that are missing after an epoch of so many, by the data's own length; 0 where it has none."""
        length = known_length(self.own_loader)
        return 0 if length is None else max(0, -(-length // most) - batches)

    def state(self, session: Session, position: Position) -> Place | None:
        """What a checkpoint keeps: of data with an index a mark of the first batch, which holds under the
        same facts alone, and one of the order so far; else where a stream stands in the middle of an epoch.
        """
        begun, place = self._pass, self._place(session, position)
        if not position.batch and isinstance(begun, PassOrder) and begun.epoch == position.epoch - 1:
            place = begun.place_behind() or None
        if mark := self.witness.mark or self.witness.wanted:
            return {"first_batch": mark, "of": self._read_under} | (place or {})
        return place

    def _facts(self, session: Session) -> list[str]:
        """What the last bit of a batch may depend on beside the data."""
        workers = "workers" if getattr(self.own_loader, "num_workers", 0) else "no workers"
        machine = [platform.machine(), torch.backends.cpu.get_cpu_capability(), str(torch.get_num_threads())]
        plan = [session.plan.id, str(self.ranks.world_size), workers]
        return [*map(_version_of, _READERS), *machine, *plan]

    def _begin_witness(self, session: Session) -> None:
        """Expect the first batch of the run that is continued. Only rank 0 looks: each has another share."""
        kept = self.place or {}
        self.place = {key: kept[key] for key in ("epoch", "batch", "order") if key in kept} or None
        if kept.get("of") == self._facts(session) and not self._changed:
            self.witness = Witness(str(kept["first_batch"]))

    def _require_same(self) -> None:
        if self.witness.changed:
            raise JobError(
                "the data are others than those with which the run began (the first batch is not what it was)"
                ": resume with the data it was started with, choose a new name, or accept the change with "
                "--changed ok (changed='ok')"
            )

    def _place(self, session: Session, position: Position) -> Place | None:
        if self._pass is None or not position.batch:
            return None
        return self._pass.place(position.batch * _batches_per_step(session)) or None

    def require_one_stream(self, session: Session, position: Position) -> None:
        """Once in a run. Raises JobError on all ranks where these read different streams."""
        asked, self._compared = self._compared, True
        if asked or self.ranks.world_size == 1:
            return
        place = self._place(session, position) or {}
        if len(set(self.ranks.gather(place.get("mark") or place.get("order")))) > 1:
            raise JobError(
                "the ranks read different data, and Vivace splits every batch itself: most of the data would "
                "be lost; leave out what splits the data by rank (a sampler's rank; split_by_node; a "
                "WebDataset takes nodesplitter=None)"
            )

    def unordered(self) -> str:
        """Once in a run: a sentence where a stream, read a second time, begins otherwise; else empty."""
        begun, asked, self._asked = self._pass, self._asked, True
        if asked or not isinstance(begun, IterableData) or not begun.first:
            return ""
        try:
            source = self._made(begun.epoch)
            if _share_data(source, begun.source) or first_mark(source, begun) == begun.first:
                return ""
        except Exception as error:
            return f"the data cannot be read a second time, so a stopped run will not go on: {blame(error)}"
        return (
            "the data come otherwise each time that they are read: this run, once stopped, cannot go on bit "
            "for bit; a seed of its own makes a shuffle exact"
        )

    def _made(self, epoch: int) -> Any:
        """The Job's data, made anew: what lives for one pass under streams of the epoch."""
        once = isinstance(self.own_loader, Iterator)
        with Streams(derive(self.seed, "data", epoch) if once else derive(self.seed, "data")):
            return call(self.job, "data")

    def _renewed(self, epoch: int) -> Any:
        self.loader = self.own_loader = self._made(epoch)
        return self.loader

    def _until_it_breaks(self, session: Session, position: Position) -> Generator[Any, None, str]:
        """Batches, drawn without touching the training's random streams; returns what broke, and can be tried
        again: `_KILLED`, or what the data raised. Empty at their end.
        """
        epoch = position.epoch
        self.place = self._place(session, position) or self.place
        if isinstance(self.place, dict) and "first_batch" in self.place:
            self._begin_witness(session)
        if isinstance(self.loader, Iterator):  # a generator lives for one epoch
            self._renewed(epoch)
        loader = ordered(
            self.loader,
            seed=self.seed,
            epoch=epoch,
            start_batch=position.batch * _batches_per_step(session),
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            damage=self.damage,
            place=self.place,
            renew=lambda: self._renewed(epoch),
            witness=None if self.ranks.rank else self.witness,
        )
        if self.place is not None:  # asked for once, also where a worker is lost
            self.place = {key: value for key, value in self.place.items() if key != "passed"}
        self._pass = loader if isinstance(loader, IterableData) else order_of(loader)
        if not isinstance(loader, IterableData) and not self.witness.mark:
            self._read_under = self._facts(session)
        if order_of(loader) is not None:
            self.loader = loader
        batches = fed(session, loader, derive(self.seed, epoch, "feed"))
        self.hangs.begin_pass()
        while True:
            try:
                self.workers.check()
                with self.hangs.waiting():
                    batch = next(batches)
            except StopIteration:
                self._tell_notices()
                return ""
            except (Exception, SystemExit) as error:
                from_workers = end_workers_of(error)
                if isinstance(error, VivaceError):
                    raise
                if is_lost_worker(error, from_workers=from_workers):
                    return _KILLED
                if isinstance(error, ConnectionError):
                    return blame(error)
                where = _where(position)
                if short := _lacks_memory(error):
                    raise OutOfMemory(short.format(where=where, why=blame(error))) from error
                why = _little_shared_memory() if is_no_shared_memory(error) else ""
                raise JobError(f"the data failed at {where}: {why or blame(error)}") from error
            self._require_same()
            self._tell_notices()
            yield batch

    def _tell_notices(self) -> None:
        while self._pass is not None and self._pass.notices:
            self.notice(self._pass.notices.pop(0))


def _lacks_memory(error: BaseException) -> str:
    """What to say where it is not the data that failed, but memory for a batch on its way to the GPU."""
    locking = (
        isinstance(error, NoPageLockedMemory) or is_of_pinning_thread(error) or while_page_locking(error)
    )
    of_gpu = isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError, NoPageLockedMemory))
    if not of_gpu or not ran_out_of_memory(error):
        return ""
    if locking:
        return (
            "the host's memory does not hold {where} page-locked, as a GPU copies it: a smaller batch may "
            "fit, or a loader and a plan that lock none (pin_memory=False, without pinned_prefetch)"
        )
    return (
        "the GPU's memory does not hold {where} beside the rest ({why}): a smaller batch may fit, or a plan "
        "that brings none ahead"
    )


@functools.cache
def _version_of(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return package


def _where(position: Position) -> str:
    return f"batch {position.batch} of epoch {position.epoch + 1}"


def _little_shared_memory() -> str:
    """Why workers may not be able to hand their batches over, and what to do; empty where there is room."""
    free = shared_memory()
    return "" if free is None or free >= LITTLE_SHARED_MEMORY else "; ".join(little_shared_memory(free))


def _batches_per_step(session: Session) -> int:
    return session.build.facts.batches_per_step


def _share_data(one: object, other: object) -> bool:
    """Would a pass over `one` disturb one that goes on over `other`?"""
    dataset = getattr(one, "dataset", None)
    return one is other or (dataset is not None and dataset is getattr(other, "dataset", None))
