"""Ranks: the processes of one torchrun launch, which refuse together and stop together; or one alone."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import signal
import socket
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from vivace import words
from vivace.errors import (
    InputError,
    OutOfMemory,
    PlanError,
    RankLost,
    VivaceError,
    is_broken_exchange,
    ran_out_of_memory,
)
from vivace.inspection import inspect
from vivace.inspection.device_choice import of_launch
from vivace.plan import Plan
from vivace.processes import child
from vivace.processes.zygote import die_with_parent
from vivace.technique import Stage, registry
from vivace.tensors.exchange import spread
from vivace.training.meeting import agreed_name, launch_store, open_sockets, torchrun_keeps_the_store
from vivace.training.rank_watch import WHY_SECONDS, Activity, RankWatch
from vivace.training.verdict import BUSY_TIMES

PATIENCE_SECONDS = 300.0
_PROCESS = uuid.uuid4().hex


class Stranded(Exception):
    """An exchange with the other ranks broke: one of them, or the link to it, is gone."""


class Ranks:
    """This process's place among `world_size` equals. With one rank, nothing is sent to others.

    Args:
        store: torchrun's store, through which the ranks meet in a process group; None where there is none, or
            where the person's own code has made the group.
        patience: the seconds for which the others wait where one rank does not go on.

    Where an exchange breaks, `Stranded` is raised.
    """

    def __init__(
        self, rank: int = 0, world_size: int = 1, store: Any = None, patience: float = PATIENCE_SECONDS
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.patience = patience
        self.watch: RankWatch | None = None
        self.activity = Activity()
        self._launch, self._generation = store, 0
        self._store: Any = None
        self._own: Any = None  # for agreements, so that none is taken for an exchange of gradients
        self._connections = set[tuple[int, int]]()
        if store is not None and world_size > 1:
            name = agreed_name(store, rank, world_size, patience)
            self._store = dist.PrefixStore(f"vivace/{name}", store)  # type: ignore[attr-defined]
            self._join()
            self.watch = RankWatch(self._store, rank, world_size, patience, self.cut)
            self.watch.activity = self.activity
            self.watch.start()
        elif world_size > 1:
            self._own = dist.new_group(backend="gloo")

    def began_before(self, what: str) -> bool:
        """Did an earlier attempt of this torchrun launch call `begin`? Its store outlives its attempts."""
        key, found = f"vivace/began/{what}", False
        if self._launch is not None and self.rank == 0 and self._launch.check([key]):
            found = self._launch.get(key).decode() != _PROCESS
        return bool(self.from_first(found))

    def begin(self, what: str) -> None:
        """Let later attempts of this launch know that this one came so far."""
        if self._launch is not None:
            self._launch.set(f"vivace/began/{what}", _PROCESS)

    def cry(self) -> None:
        """Tell the other ranks that this one cannot end its step; they hear it when the exchange breaks."""
        if self._store is not None:
            key = f"cry/{self._generation}"
            with contextlib.suppress(RuntimeError):  # the link is gone, as the others will notice
                self._store.set(key, str(self.rank))
                self._store.check([key])  # answered when the news has come: before the exchange breaks

    def heard(self) -> bool:
        """Has a rank cried since all ranks last joined?"""
        if self._store is None or (self.watch is not None and self.watch.verdict is not None):
            return False  # where it is judged why, the store may be out of reach
        try:
            return bool(self._store.check([f"cry/{self._generation}"]))
        except RuntimeError:  # the link is gone
            return False

    def leave(self, error: BaseException) -> None:
        """Tell the others, and torchrun, why this rank ends before the training does.

        torchrun may call whichever rank ends first the cause, so those that lost another one say so too.
        """
        if self.watch is None:
            return
        if not isinstance(error, RankLost):
            self.watch.farewell(str(error) or type(error).__name__)
        if isinstance(error, Exception):
            get_error_handler().record_exception(error)

    def close(self) -> None:
        """Leave the process group for good."""
        if self.watch is not None:
            self.watch.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def regroup(self) -> None:
        """Leave the process group, which breaks exchanges that wait for this rank, and meet in a new one."""
        if self._store is not None:
            everyone, self._own = dist.group.WORLD, None
            assert everyone is not None
            with contextlib.suppress(RuntimeError):  # backends that cannot are left by closing them
                everyone.abort()
            del everyone  # the group ends, and lets its sockets go, with the last name for it
            dist.destroy_process_group()
            gc.collect()
            _break(self._connections)
            self._generation += 1
            self._join()

    def _join(self) -> None:
        before, longest = open_sockets(), timedelta(seconds=self.patience * (BUSY_TIMES + 1))
        on_gpus = torch.cuda.is_available()
        with _naming_nccl() if on_gpus else contextlib.nullcontext():
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if on_gpus else "gloo",
                store=dist.PrefixStore(str(self._generation), self._store),  # type: ignore[attr-defined]
                rank=self.rank,
                world_size=self.world_size,
                timeout=longest,
            )
        self._own = dist.new_group(backend="gloo", timeout=longest)
        self._connections = open_sockets() - before
        if on_gpus and not self._generation and inspect().device.kind == "cuda":
            self._begin_nccl()

    def _begin_nccl(self) -> None:
        """The first exchange on GPUs: NCCL may start with it, and its failure later reads as a lost rank."""
        with self.together(), _naming_nccl():
            number = torch.zeros(1, device="cuda")
        with _naming_nccl():
            dist.all_reduce(number)

    def cut(self) -> None:
        """Break every exchange in which this rank stands; called from a thread beside it."""
        if torch.cuda.is_available() and dist.group.WORLD is not None:
            with contextlib.suppress(RuntimeError):
                dist.group.WORLD.abort()
        _break(self._connections)

    def at(self, what: str, step: int) -> None:
        """Let the others know what this rank does from here on; `step` steps were begun."""
        self.activity.set(what, step)

    @contextmanager
    def _agreement(self) -> Iterator[None]:
        self.activity.agreements += 1
        try:
            yield
        except RuntimeError as error:
            if self.watch is not None:
                self.watch.came_back()
            raise Stranded(str(error)) from None

    @property
    def writes(self) -> bool:
        """Is this the rank that writes files and reports progress?"""
        return self.rank == 0

    def numbers(self, *values: float) -> list[list[float]]:
        """The values of every rank, in the order of ranks."""
        own = torch.tensor(values, dtype=torch.float64)
        if self.world_size == 1:
            return [own.tolist()]
        found = [torch.empty_like(own) for _ in range(self.world_size)]
        with self._agreement():
            dist.all_gather(found, own, group=self._own)
        return [row.tolist() for row in found]

    def largest(self, *values: float) -> list[float]:
        """For each value the largest over all ranks."""
        return [max(column) for column in zip(*self.numbers(*values), strict=True)]

    def mean(self, value: float) -> float:
        """The mean of `value` over all ranks."""
        return sum(row[0] for row in self.numbers(value)) / self.world_size

    def gather(self, thing: object) -> list[Any]:
        """What every rank handed in, in the order of ranks."""
        if self.world_size == 1:
            return [thing]
        found: list[Any] = [None] * self.world_size
        with self._agreement():
            dist.all_gather_object(found, thing, group=self._own)
        return found

    def from_first(self, thing: object) -> Any:
        """What rank 0 handed in."""
        return self.gather(thing)[0]

    def spread(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give these tensors, in place, the numbers that rank 0 has in its own."""
        if self.world_size > 1:
            spread(tensors)

    def all_end_at(self, place: str) -> bool:
        """Do all ranks end here, before any exchange, so that they can still do the last thing together?

        Waits for those that may still come, but not for one that is in an exchange with this one instead.
        """
        if self.watch is None:
            return self.world_size == 1
        self.watch.post(f"end/{self.rank}", place)
        deadline = time.monotonic() + self.patience
        while True:
            places = [self.watch.read(f"end/{rank}") for rank in range(self.world_size)]
            missing = [rank for rank, found in enumerate(places) if not found]
            if not missing or set(places) - {place, ""}:
                return set(places) == {place}
            if time.monotonic() > deadline or not all(map(self.watch.may_come, missing)):
                return False
            time.sleep(0.05)

    @contextmanager
    def answering(self, what: str) -> Iterator[None]:
        """One command of a process that works as a rank: where it fails here, the others hear why and end
        theirs; where time for it runs out, whom they wait for is noted. `what` says what it is, as for `at`.

        Raises RankLost where it failed on another one.
        """
        self.at(what, self.activity.step)
        self._limit(child.limit())
        try:
            yield
        except BaseException as error:
            lost = self.lost(error)
            if lost is None:
                self.leave(error)
                self.cut()
                raise
            raise lost from None
        finally:
            self._limit(math.inf)

    def _limit(self, seconds: float) -> None:
        if self.watch is not None:
            self.watch.limit = seconds

    def lost(self, error: BaseException) -> RankLost | None:
        """The error as the loss of another rank; None where it is this one's own."""
        broken = isinstance(error, Stranded) or (
            isinstance(error, RuntimeError) and is_broken_exchange(error)
        )
        if not broken:
            return None
        why = self.watch.why(WHY_SECONDS) if self.watch is not None else None
        return RankLost(why.sentence if why else "another rank is gone")

    @contextmanager
    def together(self) -> Iterator[None]:
        """Where one rank raises a VivaceError inside, all ranks raise it."""
        mine: VivaceError | None = None
        try:
            yield
        except VivaceError as error:
            mine = error
        first = next((error for error in self.gather(mine) if error is not None), None)
        if mine is not None:
            raise mine
        if first is not None:
            raise first


@contextmanager
def _naming_nccl() -> Iterator[None]:
    """Where ranks cannot meet on their GPUs, InputError says so with NCCL's reason."""
    try:
        yield
    except RuntimeError as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if ran_out_of_memory(error):
            raise OutOfMemory(
                f"the GPU has no memory left for the exchange between ranks ({reason})"
            ) from error
        raise InputError(
            f"the ranks' GPUs cannot reach each other: NCCL does not start ({reason}); "
            'one GPU trains without torchrun, and CUDA_VISIBLE_DEVICES="" trains on processors'
        ) from error


def _break(connections: set[tuple[int, int]]) -> None:
    """End these connections for both sides, whoever still holds the object that opened them.

    A process group closes its own only when its last reference goes, and default arguments of functions
    (``group=group.WORLD`` in torch.distributed.nn and elsewhere) keep one for ever. Where this rank keeps the
    store of the launch, those of others to it stay: one may have come while this rank's own were counted.
    """
    store = int(os.environ.get("MASTER_PORT", "0"))
    for descriptor, _ in connections & open_sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            to_store = connection.getsockname()[1:2] == (store,)
            if not listens and not to_store:  # gloo aborts the process where its listener ends
                connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def joined(plan: Plan, patience: float = PATIENCE_SECONDS) -> Iterator[Ranks]:
    """The ranks that torchrun started, joined in a process group until the end; else this process alone.

    Raises PlanError where several ranks would train without the technique that averages their gradients, and
    RankLost where some do not come within `patience` seconds.
    """
    world_size = of_launch("WORLD_SIZE", 1)
    if world_size == 1:
        yield Ranks(store=launch_store(0, 1, patience) if torchrun_keeps_the_store() else None)
        return
    require_one_model(plan, world_size)
    die_with_parent(os.getppid(), signal.SIGTERM)  # no rank outlives torchrun
    _take_gpu()
    if dist.is_initialized():
        yield Ranks(dist.get_rank(), dist.get_world_size())
        return
    rank = of_launch("RANK")
    ranks = Ranks(rank, world_size, launch_store(rank, world_size, patience), patience)
    try:
        try:
            yield ranks
        except BaseException as error:
            lost = ranks.lost(error)
            if lost is None:
                raise
            raise RankLost(f"{lost}; no training was lost") from None
    except BaseException as error:
        ranks.leave(error)
        raise
    finally:
        ranks.close()


def met_under(name: str, patience: float = PATIENCE_SECONDS) -> Ranks:
    """The ranks of this launch, each in a child process that was told `name`; for a process's whole life."""
    rank, world_size = of_launch("RANK"), of_launch("WORLD_SIZE")
    _take_gpu()
    store = dist.PrefixStore(name, launch_store(rank, world_size, patience))  # type: ignore[attr-defined]
    return Ranks(rank, world_size, store, patience)


def _take_gpu() -> None:
    """Let CUDA's current device be this rank's own. Raises InputError where there is none for it."""
    if not torch.cuda.is_available():
        return
    number, gpus = of_launch("LOCAL_RANK", 0), torch.cuda.device_count()
    if number >= gpus:
        raise InputError(
            f"rank {number} of this machine has no GPU, as torch shows {words.count(gpus, 'GPU')}: start as "
            f'many ranks (--nproc-per-node {gpus}), or set CUDA_VISIBLE_DEVICES="" to train on the processor'
        )
    torch.cuda.set_device(number)


def require_one_model(plan: Plan, world_size: int) -> None:
    """Raises PlanError where several ranks under this plan would train as many models."""
    if not averages(plan):
        able = " or ".join(f"[techniques.{c.name}]" for c in registry.everything() if c.card.averages_ranks)
        raise PlanError(
            f"{world_size} ranks were started, but the plan ({plan}) would train {world_size} separate "
            f"models: add {able} to the plan, or start one process"
        )


def averages(plan: Plan) -> bool:
    """Do several ranks under this plan train one model?"""
    return any(technique.card.averages_ranks for technique in plan.techniques)


def for_so_many(plan: Plan, world_size: int) -> Plan:
    """The plan of a run that goes on with another number of processes: the techniques of several ranks go
    where one is left, and the one that averages gradients comes where there are several.
    """
    if world_size == 1:
        return Plan([one for one in plan.techniques if one.card.stage != Stage.PARALLEL])
    if averages(plan):
        return plan
    return plan.adding(next(cls() for cls in registry.everything() if cls.card.averages_ranks))
