"""Ranks: the processes of one torchrun launch, which refuse together and stop together; or one alone."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from vivace.errors import PlanError, VivaceError
from vivace.plan import Plan
from vivace.technique import registry

_PR_SET_PDEATHSIG = 1
_PROCESS = uuid.uuid4().hex
NEWS_SECONDS = 2.0
MEETING_SECONDS = 1800.0


class Ranks:
    """This process's place among `world_size` equals. With one rank, nothing is sent to others.

    Args:
        store: torchrun's store, through which the ranks meet in a process group; None where there is none, or
            where the person's own code has made the group.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, store: Any = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self._launch, self._generation = store, 0
        self._store: Any = None
        if store is not None and world_size > 1:
            name = agreed_name(store, rank, world_size)
            self._store = dist.PrefixStore(f"vivace/{name}", store)  # type: ignore[attr-defined]
            self._join()

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
            self._store.set(f"cry/{self._generation}", str(self.rank))

    def heard(self) -> bool:
        """Has a rank cried since all ranks last joined? Waits a little: the news may still be on its way."""
        if self._store is None:
            return False
        deadline = time.monotonic() + NEWS_SECONDS
        while not self._store.check([f"cry/{self._generation}"]):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def regroup(self) -> None:
        """Leave the process group, which breaks exchanges that wait for this rank, and meet in a new one."""
        if self._store is not None:
            everyone = dist.group.WORLD
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
        before = _open_sockets()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            store=dist.PrefixStore(str(self._generation), self._store),  # type: ignore[attr-defined]
            rank=self.rank,
            world_size=self.world_size,
        )
        self._connections = _open_sockets() - before

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
        """The mean of `value` over all ranks."""
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


def agreed_name(store: Any, rank: int, world_size: int) -> str:
    """A name that the processes which meet now share, and no earlier attempt of the same launch had.

    torchrun keeps one store over all attempts, in which addresses of the dead remain, and its count of
    restarts differs from node to node. Each process posts a name of its own; rank 0 publishes those that it
    sees, and the others believe a list in which their own stands. Raises TimeoutError.
    """
    own, deadline = uuid.uuid4().hex, time.monotonic() + MEETING_SECONDS
    store.set(f"vivace/here/{rank}", own)
    while time.monotonic() < deadline:
        if rank == 0:
            keys = [f"vivace/here/{other}" for other in range(world_size)]
            names = [store.get(key).decode() if store.check([key]) else "" for key in keys]
            store.set("vivace/names", json.dumps(names))
            if all(store.check([f"vivace/{own}/agreed/{other}"]) for other in range(1, world_size)):
                return own
        elif store.check(["vivace/names"]):
            names = json.loads(store.get("vivace/names"))
            if names[rank : rank + 1] == [own]:
                store.set(f"vivace/{names[0]}/agreed/{rank}", "")
                return str(names[0])
        time.sleep(0.02)
    raise TimeoutError(f"rank {rank} has waited {MEETING_SECONDS:.0f} s for the other {world_size - 1}")


def _open_sockets() -> set[tuple[int, int]]:
    """Descriptor and inode of each socket of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed again
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(name), status.st_ino))
    return found


def _break(connections: set[tuple[int, int]]) -> None:
    """End these connections for both sides, whoever still holds the object that opened them.

    A process group closes its own only when its last reference goes, and default arguments of functions
    (``group=group.WORLD`` in torch.distributed.nn and elsewhere) keep one for ever.
    """
    for descriptor, _ in connections & _open_sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if not listens:  # gloo aborts the process where its listener ends
                connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def joined(plan: Plan) -> Iterator[Ranks]:
    """The ranks that torchrun started, joined in a process group until the end; else this process alone.

    Raises PlanError where several ranks would train without the technique that averages their gradients.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        yield Ranks(store=_launch_store() if torchrun else None)
        return
    if not any(technique.card.averages_ranks for technique in plan.techniques):
        able = " or ".join(f"[techniques.{c.name}]" for c in registry.everything() if c.card.averages_ranks)
        raise PlanError(
            f"{world_size} ranks were started, but the plan ({plan}) would train {world_size} separate "
            f"models: add {able} to the plan, or start one process"
        )
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # no rank outlives torchrun
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if dist.is_initialized():
        yield Ranks(dist.get_rank(), dist.get_world_size())
        return
    store = _launch_store()
    try:
        yield Ranks(int(os.environ["RANK"]), world_size, store)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _launch_store() -> Any:
    return next(dist.rendezvous("env://"))[0]  # type: ignore[attr-defined]
