"""Several processes that train one model with DistributedDataParallel, under one decision: the first process
leads the search, and tells the others what acts from which step on.

They meet at steps that all of them know beforehand, after the optimizer's update, through a connection of
their own to the store by which the script's processes found each other. Nothing of the script's is exchanged.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakValueDictionary as Held

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vivace import words
from vivace.errors import Refused
from vivace.live.kept import CannotKeep
from vivace.live.refusals import Seen, several
from vivace.plan import Plan
from vivace.torch_internals.tensors import Operator, OperatorMode

MOST_STEPS = 200  # until they meet again
PATIENCE_SECONDS = 15.0  # until a process that does not come to a step is no longer waited for
SHORTEST_LOOK, LONGEST_LOOK = 5e-5, 5e-3  # seconds between two looks for a message
FIRST = "the first process"
_LOOPS = itertools.count()  # that this process has led or followed, as many as each of the others


class Ranks:
    """This process among those that train one model together; the first one `leads`.

    `next_step` is the one after which all of them meet again.

    Args:
        store: a `torch.distributed.Store` that all of them reach, used by this object alone.
        rank: of this process, from 0.
        world_size: how many there are.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.leads = rank, world_size, rank == 0
        self.next_step = 0
        self._store = store
        self._agreed: set[Plan] = {Plan()}  # on which all processes can act
        self._has_left = False
        if not self.leads:
            store.add("ready", 1)

    @property
    def missing(self) -> str:
        """Why the first process cannot lead the others; or empty."""
        ready = 1 + int(self._store.add("ready", 0))
        if ready < self.world_size:
            return f"{ready} of {self.world_size} processes that train one model were started by Vivace"
        return self.lost

    @property
    def lost(self) -> str:
        """Why one of the others goes on as it is though this one has not left; or empty."""
        if self._has_left:
            return ""
        with contextlib.suppress(RuntimeError):  # where the store has ended before
            return str(self._store.get("gone").decode()) if self._store.check(["gone"]) else ""
        return ""

    def arrive(self, step: int) -> None:
        """The first process has come to a step at which they meet, and may take long before it speaks."""
        self._store.set(f"at/{step}", "")

    def lead(self, step: int, plan: Plan | None, steps: int) -> str:
        """Tell the others what acts from here on for so many steps; None: there is no search yet.

        Returns why one of them cannot act under it: then none does. Or empty.
        """
        asks = plan is not None and plan not in self._agreed
        said = {"plan": None if plan is None else plan.to_dict(), "steps": steps, "asks": asks}
        self._store.set(f"said/{step}", json.dumps(said))
        self.next_step = step + steps
        if plan is None or not asks:
            return ""
        reason = self._answers(step)
        self._store.set(f"all/{step}", reason)
        if not reason:
            self._agreed.add(plan)
        return reason

    def _answers(self, step: int) -> str:
        for rank in range(1, self.world_size):
            key = f"can/{step}/{rank}"
            if not self._appears(key):
                return f"process {rank} did not answer within {words.duration(PATIENCE_SECONDS)}"
            if reason := self._store.get(key).decode():
                return f"process {rank}: {reason}"
        return ""

    def follow(self, step: int, host: Callable[[Plan], str] | None = None) -> Plan | str | None:
        """What acts from here on, as the first process says; None before its search. Or why it does not lead.

        `host` lets a plan act, or says why it cannot.
        """
        if not self._appears(f"said/{step}", f"at/{step}"):
            return self._why_silent(step)
        said = json.loads(self._store.get(f"said/{step}"))
        self.next_step = step + said["steps"]
        if said["plan"] is None:
            return None
        plan = Plan.from_dict(said["plan"])
        if said["asks"]:
            assert host is not None
            self._store.set(f"can/{step}/{self.rank}", host(plan))
            if not self._appears(f"all/{step}", f"at/{step}"):
                return self._why_silent(step)
            if reason := str(self._store.get(f"all/{step}").decode()):
                return reason
        return plan

    def _appears(self, key: str, grace: str = "") -> bool:
        """Wait for a key; without end where the key `grace` is there, which says that it will come, and not
        where the first process has left.
        """
        end, pause = math.inf, SHORTEST_LOOK
        while not self._store.check([key]):
            if not self.leads and self._store.check(["left"]):
                return bool(self._store.check([key]))
            if time.perf_counter() > end and not (grace and self._store.check([grace])):
                return False
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_LOOK)
            if pause == LONGEST_LOOK and end == math.inf:
                _settle()
                end = time.perf_counter() + PATIENCE_SECONDS
        return True

    def _why_silent(self, step: int) -> str:
        if self._store.check(["left"]):
            return self._store.get("left").decode() or f"{FIRST} has ended its search"
        return f"{FIRST} did not come to step {step} within {words.duration(PATIENCE_SECONDS)}"

    def leave(self, reason: str) -> None:
        """This process goes on as it is."""
        if self._has_left:
            return
        self._has_left = True
        with contextlib.suppress(RuntimeError):  # where the store has ended before
            if self.leads:
                self._store.set("left", reason)
            elif reason:
                self._store.set("gone", f"process {self.rank}: {reason}")


def _settle() -> None:
    """Wait for the device: until its gradients are averaged, the others may be somewhere before that step."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


class _Alone(OperatorMode):  # type: ignore[no-untyped-call]
    def run_operator(self, function: Operator, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """What comes of the operator."""
        if "c10d" in function.namespace:
            raise CannotKeep("its model exchanges tensors with other processes while it is called")
        return function(*arguments, **keywords)


def alone() -> AbstractContextManager[object]:
    """Inside, what exchanges tensors with other processes raises CannotKeep: none of them would answer."""
    return _Alone() if several() else nullcontext()  # type: ignore[no-untyped-call]


def _wraps_for_all(root: nn.Module) -> bool:
    """Does it average the gradients of one model over all processes?"""
    return type(root) is DistributedDataParallel and root.process_group.size() == dist.get_world_size()


def joined(seen: Seen) -> Ranks | None:
    """The processes that train together, where DistributedDataParallel wraps each model that the loop calls;
    `seen` holds what it wraps from then on. None where it does not, or where this is not torch's own store.
    """
    roots = list(seen.roots.values())
    if not several() or not roots or not all(map(_wraps_for_all, roots)):
        return None
    from vivace.torch_internals.groups import default_store

    try:
        store = default_store()
    except Refused:
        return None
    inner = [root.module for root in roots]
    seen.roots = Held({id(module): module for module in inner if isinstance(module, nn.Module)})
    own = dist.PrefixStore(f"vivace/run/{next(_LOOPS)}", store.clone())  # type: ignore[attr-defined]
    return Ranks(own, dist.get_rank(), dist.get_world_size())
