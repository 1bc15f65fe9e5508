"""Ranks: the processes of one torchrun launch, which refuse together and stop together; or one alone."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from vivace.errors import PlanError, VivaceError
from vivace.plan import Plan

_PR_SET_PDEATHSIG = 1
NEWS_SECONDS = 2.0


class Ranks:
    """This process's place among `world_size` equals. With one rank, nothing is sent anywhere."""

    def __init__(self, rank: int = 0, world_size: int = 1, store: Any = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store, self._generation = store, 0
        if store is not None:
            self._join()

    def cry(self) -> None:
        """Tell the other ranks that this one cannot end its step; they hear it when the exchange breaks."""
        if self._store is not None:
            self._store.set(f"vivace/cry/{self._generation}", str(self.rank))

    def heard(self) -> bool:
        """Has a rank cried since all ranks last joined? Waits a little: the news may still be on its way."""
        if self._store is None:
            return False
        deadline = time.monotonic() + NEWS_SECONDS
        while not self._store.check([f"vivace/cry/{self._generation}"]):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def regroup(self) -> None:
        """Leave the process group, which breaks exchanges that wait for this rank, and meet in a new one."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # backends that cannot are left by closing them
                dist.distributed_c10d._get_default_group().abort()
            gc.collect()  # a wrapper in a cycle of references would keep the connections open
            dist.destroy_process_group()
            self._generation += 1
            self._join()

    def _join(self) -> None:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            store=dist.PrefixStore(f"vivace/{self._generation}", self._store),  # type: ignore[attr-defined]
            rank=self.rank,
            world_size=self.world_size,
        )

    @property
    def writes(self) -> bool:
        """Is this the rank that writes files and reports progress?"""
        return self.rank == 0

    def largest(self, *values: float) -> list[float]:
        """For each value the largest over all ranks."""
        if self.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return list(tensor.tolist())

    def mean(self, value: float) -> float:
        """The mean over all ranks."""
        if self.world_size == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(tensor)
        return float(tensor) / self.world_size

    def gather(self, thing: Any) -> list[Any]:
        """What every rank handed in, in the order of ranks."""
        if self.world_size == 1:
            return [thing]
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, thing)
        return found

    def from_first(self, thing: Any) -> Any:
        """What rank 0 handed in."""
        return self.gather(thing)[0]

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
def joined(plan: Plan) -> Iterator[Ranks]:
    """The ranks that torchrun started, joined in a process group until the end; else this process alone.

    Raises PlanError where several ranks would train without the technique that averages their gradients.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        yield Ranks()
        return
    if "ddp" not in plan.names:
        raise PlanError(
            f"{world_size} ranks were started, but the plan ({plan}) would train {world_size} separate "
            "models: add [techniques.ddp] to the plan, or start one process"
        )
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # no rank outlives torchrun
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if dist.is_initialized():
        yield Ranks(dist.get_rank(), dist.get_world_size())
        return
    store, rank, world_size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    try:
        yield Ranks(rank, world_size, store)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
