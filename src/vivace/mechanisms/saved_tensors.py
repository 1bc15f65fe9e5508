"""Saved tensors in another form: what blocks keep for the backward pass, compressed or in host memory.

Only the representation of saved tensors changes, by the hooks that autograd has for it; the graph, its hooks
and custom autograd functions stay as they are. A storage that several operators save is stored once.
Source: https://docs.pytorch.org/docs/stable/autograd.html#torch.autograd.graph.saved_tensors_hooks
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from vivace.errors import Refused
from vivace.mechanisms.blocks import Block, held, running_batch, without_transforms
from vivace.technique import Build
from vivace.tensors.page_locked import page_locking
from vivace.tensors.trees import tensors
from vivace.torch_internals.tensors import storage_id, storage_ids, version_of

PIECE = 2**14  # numbers that are looked at together, with as many bytes beside them
LARGE = 8  # statistics, such as the logarithms that attention saves, are far smaller than a block's input


class Stored:
    """A whole storage in its other form. The graph's nodes hold it, and it dies with them."""

    def __init__(self, content: Any, num_bytes: int, visit: Visit) -> None:
        self.content, self.num_bytes = content, num_bytes
        self.visit = weakref.ref(visit)
        self.flat: torch.Tensor | None = None  # restored, for the nodes that still want it


class Store:
    """Base of stores. `spared` holds the bytes of device memory that the latest call of a block did without.

    Args:
        build: the bench of the technique.
        technique: its name, for refusals.
    """

    def __init__(self, build: Build, technique: str) -> None:
        self.build, self.technique = build, technique
        self.spared: dict[str, int] = {}
        self.latest: weakref.ref[Visit] | None = None
        self._known: dict[Any, tuple[Any, weakref.ref[Stored]]] = {}

    def suits(self, tensor: torch.Tensor) -> bool:
        """Can a tensor of this kind be stored?"""
        raise NotImplementedError

    def put(self, flat: torch.Tensor) -> tuple[Any, int]:
        """A storage in its other form, and the bytes that this form takes on the device.

        `flat` holds all numbers of the storage in one dimension.
        """
        raise NotImplementedError

    def get(self, stored: Stored) -> torch.Tensor:
        """The `flat` of which `stored` was made."""
        raise NotImplementedError

    def around(
        self, block: Block, call: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """The block's result; what it saves for the backward pass is in this store."""
        if not torch.is_grad_enabled():
            return call(*arguments, **keywords)
        with without_transforms(self.technique):
            own = [t for pair in held(block.tree()) for group in pair for t in group.values()]
            own = [t for t in own if t is not None]
            dense = (t for t in tensors((arguments, keywords)) if t.layout == torch.strided)
            largest = max((t.untyped_storage().nbytes() for t in dense), default=0)
            visit = Visit(self, storage_ids([*own, *tensors(running_batch(self.build))]), largest // LARGE)
            self.latest = weakref.ref(visit)
            with saved_tensors_hooks(visit.pack, visit.unpack):
                result = call(*arguments, **keywords)
        self.spared[block.name] = visit.spared
        return result

    def stored(self, tensor: torch.Tensor, visit: Visit) -> Stored:
        """The storage of `tensor` in its other form, made when it is first asked for."""
        storage = tensor.untyped_storage()
        key = (storage_id(storage), version_of(tensor), tensor.dtype)
        # The reference keeps the storage's address from being used again, and its memory not alive.
        self._known = {k: (r, s) for k, (r, s) in self._known.items() if not r.expired() and s() is not None}
        found = self._known[key][1]() if key in self._known else None
        if found is None:
            count = storage.nbytes() // tensor.element_size()
            flat = tensor.detach().as_strided((count,), (1,), 0)
            content, size = self.put(flat)
            found = Stored(content, storage.nbytes(), visit)
            visit.stored.append(weakref.ref(found))
            visit.spared += storage.nbytes() - size
            alive = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._known[key] = alive, weakref.ref(found)
        return found


class Visit:
    """One call of one block. `before` is the call before it, whose tensors the backward pass wants next."""

    def __init__(self, store: Store, alive: set[int], smallest_bytes: int) -> None:
        self.store, self.alive, self.smallest_bytes = store, alive, smallest_bytes
        self.before = store.latest
        self.stored: list[weakref.ref[Stored]] = []
        self.spared = 0

    def pack(self, tensor: torch.Tensor) -> Any:
        """What the graph holds instead of a tensor that it saves."""
        if tensor.layout != torch.strided:  # it has no storage, and stays
            return tensor.detach()
        if tensor.is_conj() or tensor.is_neg():  # its storage holds other numbers
            return tensor.detach()
        storage = tensor.untyped_storage()
        small = storage.nbytes() < max(1, self.smallest_bytes)
        if small or storage_id(storage) in self.alive or not self.store.suits(tensor):
            return tensor.detach()
        place = tensor.size(), tensor.stride(), tensor.storage_offset()
        return self.store.stored(tensor, self), place

    def unpack(
        self, packed: torch.Tensor | tuple[Stored, tuple[torch.Size, tuple[int, ...], int]]
    ) -> torch.Tensor:
        """The tensor again, for the backward pass."""
        if torch.is_grad_enabled():
            reason = "the job takes gradients of gradients (create_graph=True)"
            raise Refused(f"{reason}, which stored tensors do not serve").by(self.store.technique)
        if isinstance(packed, torch.Tensor):
            return packed
        stored, (size, stride, offset) = packed
        if stored.flat is None:
            stored.flat = self.store.get(stored)
        restored: torch.Tensor = stored.flat.as_strided(size, stride, offset)
        return restored


class Bfloat16Store(Store):
    """Keeps the storages of saved fp32 tensors in bfloat16, which is half of their bytes."""

    def suits(self, tensor: torch.Tensor) -> bool:
        """Is the saved tensor fp32, so that this store takes it?"""
        return tensor.dtype == torch.float32

    def put(self, flat: torch.Tensor) -> tuple[Any, int]:
        """The tensor rounded to bfloat16, to nearest, and the number that is all of it that is not zero, if
        one is: a CPU's dropout keeps its mask so, and rounding that shifts every gradient to the same side.
        """
        only = _only_number(flat)
        return (flat.bfloat16(), only), 2 * flat.numel()

    def get(self, stored: Stored) -> torch.Tensor:
        """The fp32 tensor of the rounded values."""
        rounded, only = stored.content
        restored: torch.Tensor = rounded.float()
        return restored if only is None else restored.sign_().mul_(only)


def _only_number(flat: torch.Tensor) -> float | None:
    """The positive number that a CPU's tensor consists of beside zeros, unless it has other numbers too."""
    if flat.device.type != "cpu" or type(flat) is not torch.Tensor:  # a fake one has no numbers
        return None
    first = float(flat[:PIECE].amax())
    if not 0 < first < math.inf:
        return None
    for numbers in torch.split(flat, PIECE):  # most tensors show others at once
        if int((numbers == first).sum()) + int((numbers == 0).sum()) != len(numbers):
            return None
    return first


class Int8Store(Bfloat16Store):
    """fp32 storages in int8, with one fp32 scale for each 256 neighbours: off by at most half a scale.

    The largest integer of either sign is infinity, as in masks of attention, and so is what is no number.
    """

    GROUP, LARGEST = 256, 126

    def put(self, flat: torch.Tensor) -> tuple[Any, int]:
        """The numbers, their scales, and their count."""
        count, infinite = flat.numel(), float(self.LARGEST + 1)
        groups = torch.nn.functional.pad(flat, (0, -count % self.GROUP)).view(-1, self.GROUP)
        largest = groups.abs().nan_to_num_(0.0, 0.0).amax(1, keepdim=True)
        scales = (largest / self.LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
        numbers = (groups / scales).round_().nan_to_num_(infinite, infinite, -infinite).to(torch.int8)
        return (numbers, scales, count), groups.numel() + 4 * len(scales)

    def get(self, stored: Stored) -> torch.Tensor:
        """The fp32 tensor: integers times their scales."""
        numbers, scales, count = stored.content
        finite = numbers.abs() <= self.LARGEST
        return (numbers * scales).div_(finite).view(-1)[:count]  # type: ignore[no-any-return]


class HostStore(Store):
    """Storages in pinned host memory, copied to it and back on a side stream while the device computes.

    The backward pass of a block begins to fetch what the block before it will want.
    """

    def __init__(self, build: Build, technique: str, smallest_bytes: int) -> None:
        super().__init__(build, technique)
        self.smallest_bytes = smallest_bytes
        self.device = build.device
        self.side: Any = None
        if self.device.type == "cuda":
            self.side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def suits(self, tensor: torch.Tensor) -> bool:
        """Is it on the device, and worth a copy?"""
        return tensor.device == self.device and tensor.untyped_storage().nbytes() >= self.smallest_bytes

    def put(self, flat: torch.Tensor) -> tuple[Any, int]:
        """A copy in host memory, under way on the side stream."""
        with page_locking():
            host = torch.empty_like(flat, device="cpu", pin_memory=self.side is not None)
        if self.side is None:
            return host.copy_(flat), 0
        self.side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.side):
            host.copy_(flat, non_blocking=True)
        flat.record_stream(self.side)
        return host, 0

    def get(self, stored: Stored) -> torch.Tensor:
        """The copy back on the device; fetches ahead for the block before."""
        visit = stored.visit()
        self._fetch(stored)
        before = visit.before() if visit is not None and visit.before is not None else None
        for reference in [*(visit.stored if visit else []), *(before.stored if before else [])]:
            other = reference()
            if other is not None and other.flat is None:
                self._fetch(other)
        flat, arrived = stored.content
        if arrived is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(arrived)
            flat.record_stream(current)
        return flat  # type: ignore[no-any-return]

    def _fetch(self, stored: Stored) -> None:
        """Begin the copy to the device, once; from then on `content` is (tensor, event)."""
        if isinstance(stored.content, tuple):
            return
        if self.side is None:
            stored.content = stored.content.to(self.device, copy=True), None
            return
        with torch.cuda.stream(self.side):  # which did the copy to the host, and keeps the order
            flat = stored.content.to(self.device, non_blocking=True)
        stored.content = flat, self.side.record_event()
