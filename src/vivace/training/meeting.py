"""Where the processes of a launch meet: the store that torchrun keeps, and a name for each attempt."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import sys
import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from vivace.errors import RankLost

TELL_SECONDS = 30.0
LINK_SECONDS = 15  # in which a store that is reached confirms what it got
AWAITED = "awaited"  # the key under which ranks write whom they wait for as time runs out


def torchrun_keeps_the_store() -> bool:
    """Does the store of this launch live on when all of its ranks have ended?"""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def launch_store(rank: int, world_size: int, patience: float) -> Any:
    """The store of this launch, which torchrun keeps, or rank 0 where the ranks were started by hand.

    Raises RankLost where it cannot be reached within `patience` seconds.
    """
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    kept = torchrun_keeps_the_store()
    before = open_sockets()
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host,
            int(port),
            world_size,
            is_master=not kept and rank == 0,
            timeout=timedelta(seconds=patience),
            wait_for_workers=False,
            multi_tenant=not kept,
        )
    except (RuntimeError, ValueError) as error:
        raise RankLost(
            f"rank {rank} cannot reach the launch at MASTER_ADDR:MASTER_PORT '{host}:{port}' "
            f"({str(error).splitlines()[0]}): start all ranks with torchrun, which sets both"
        ) from None
    answer_or_break(open_sockets() - before)
    return store


def agreed_name(store: Any, rank: int, world_size: int, patience: float = 300.0) -> str:
    """A name that the processes which meet now share, and no earlier attempt of the same launch had.

    torchrun keeps one store over all attempts, in which addresses of the dead remain, and its count of
    restarts differs from node to node. Each process posts a name of its own; rank 0 publishes those that it
    sees, and the others believe a list in which their own stands. Raises RankLost where some do not come
    within `patience` seconds.
    """
    own, begin, told = uuid.uuid4().hex, time.monotonic(), False
    store.set(f"vivace/here/{rank}", own)
    missing: list[int] = []
    while (waited := time.monotonic() - begin) < patience:
        if rank == 0:
            keys = [f"vivace/here/{other}" for other in range(world_size)]
            names = [store.get(key).decode() if store.check([key]) else "" for key in keys]
            store.set("vivace/names", json.dumps(names))
            others = range(1, world_size)
            missing = [other for other in others if not store.check([f"vivace/{own}/agreed/{other}"])]
            if not missing:
                return own
        elif store.check(["vivace/names"]):
            names = json.loads(store.get("vivace/names"))
            if names[rank : rank + 1] == [own]:
                store.set(f"vivace/{names[0]}/agreed/{rank}", "")
                return str(names[0])
        if not told and waited >= TELL_SECONDS and missing:
            told = True
            print(f"vivace: {_not_come(missing, world_size, waited)}", file=sys.stderr, flush=True)
        time.sleep(0.02)
    if rank:
        raise RankLost(f"rank {rank} has waited {patience:.0f} s for rank 0, which has not come")
    raise RankLost(_not_come(missing, world_size, patience))


def awaited(store: Any, world_size: int) -> str:
    """For which of the processes that met in `store` the others waited at last; empty where it is not known.

    Read by who ended them, because they gave no answer in time.
    """
    try:
        if not store.check(["vivace/names"]):
            return "rank 0 has not come to meet the others"
        names = json.loads(store.get("vivace/names"))
        if missing := [rank for rank in range(world_size) if not names[rank]]:
            return f"rank {missing[0]} has not come to meet the others"
        key = f"vivace/{names[0]}/{AWAITED}"
        return str(store.get(key).decode()) if store.check([key]) else ""
    except RuntimeError:  # it cannot be reached any more
        return ""


def _not_come(missing: list[int], world_size: int, waited: float) -> str:
    names = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
    return f"{names} of {world_size} did not come within {waited:.0f} s, and the others wait"


def open_sockets() -> set[tuple[int, int]]:
    """Descriptor and inode of each socket of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed again
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(name), status.st_ino))
    return found


def answer_or_break(connections: set[tuple[int, int]]) -> None:
    """Let the kernel break these connections where the other side does not answer for `LINK_SECONDS`."""
    for descriptor, _ in connections:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LINK_SECONDS * 1000)
