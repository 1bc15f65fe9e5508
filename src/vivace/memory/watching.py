"""Watching the storages of fake tensors come and go, in the order in which real ones would."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from vivace.errors import Refused
from vivace.memory.workspace import GpuWorkspaces, Workspace, workspace_bytes
from vivace.torch_internals.tensors import (
    Operator,
    OperatorMode,
    base_of,
    dense_parts,
    schema_of,
    storage_id,
    tree_leaves,
)

WORKSPACE = "workspace"  # the phase of what operators hold for themselves


class Watch(OperatorMode):  # type: ignore[no-untyped-call]
    """Notes each storage that an operator makes, and its end. Entered after the fake mode.

    `moves` holds ``(key, bytes)`` and ``(key, -bytes)`` in order; `phase` is noted with each storage. What
    operators hold for themselves while they run counts too, on a CPU or a `gpu`. The keys in `aside` are on a
    stream of their own, those in `copies` weights in another precision.
    """

    def __init__(self, gpu: GpuWorkspaces | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gpu = gpu
        self.moves: list[tuple[int, int]] = []
        self.phase = "build"
        self.made_in: dict[int, str] = {}
        self.sizes: dict[int, int] = {}
        self.aside: set[int] = set()
        self.copies: set[int] = set()
        self._keys: dict[int, int] = {}  # address of a live storage -> key

    def run_operator(self, function: Operator, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Run the operator, then note the new storages among its results."""
        if self.phase == "backward" and _adds_gradients(function, arguments):
            return arguments[0].add_(arguments[1])
        result = function(*arguments, **keywords)
        if self.gpu is None and (extra := workspace_bytes(function, arguments, result)):
            self._move(extra, WORKSPACE)()
        taken = Workspace() if self.gpu is None else self.gpu.taken(function, arguments, self.phase)
        end = self._move(taken.num_bytes, WORKSPACE) if taken.num_bytes and taken.first else None
        for leaf in () if _is_view(function) else tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                key = self.note(leaf)
                if schema_of(function).name == "aten::_to_copy" and self._is_weight(arguments[0]):
                    self.copies.add(key)
        if taken.num_bytes and not taken.first:
            end = self._move(taken.num_bytes, WORKSPACE)
        if end is not None and not taken.stays:
            end()
        return result

    def note(self, tensor: torch.Tensor) -> int:
        """The key of a tensor's storage, which is noted if it is new; of a sparse one that of its numbers, as
        many as there may be. Raises Refused of one in rows or columns.
        """
        if tensor.layout == torch.sparse_coo:
            return [self.note(part) for part in dense_parts(tensor)][-1]
        require_known_size(tensor)
        storage = tensor.untyped_storage()
        address = storage_id(storage)
        if address not in self._keys:
            end = self._move(storage.nbytes(), self.phase)
            self._keys[address] = len(self.sizes) - 1
            weakref.finalize(storage, self._end, address, end)
        return self._keys[address]

    def _is_weight(self, tensor: torch.Tensor) -> bool:
        if tensor.layout != torch.strided:
            return False
        key = self._keys.get(storage_id(tensor.untyped_storage()), -1)
        return self.made_in.get(key) == "parameters"

    def _move(self, num_bytes: int, phase: str) -> Callable[[], None]:
        key = len(self.sizes)
        self.sizes[key], self.made_in[key] = num_bytes, phase
        self.moves.append((key, num_bytes))
        return lambda: self.moves.append((key, -num_bytes - 1))

    def _end(self, address: int, end: Callable[[], None]) -> None:
        self._keys.pop(address, None)
        end()


def require_known_size(tensor: torch.Tensor) -> None:
    """Raise Refused of a sparse tensor."""
    if tensor.layout != torch.strided:
        raise Refused("what a sparse tensor takes depends on its numbers, which a prediction does not have")


def _adds_gradients(function: Operator, arguments: tuple[Any, ...]) -> bool:
    """Is it autograd's sum of two gradients? In the first one's place, where nobody else has its memory, also
    not what it is a view of, as a transposed gradient of a weight that is used twice.

    Of fake tensors autograd makes a new one (torch/csrc/autograd/input_buffer.cpp).
    """
    if function is not torch.ops.aten.add.Tensor or torch.is_grad_enabled():
        return False
    one, other = arguments[:2]
    return (
        isinstance(other, torch.Tensor)
        and one is not other
        and base_of(one) is None
        and (one.shape, one.dtype) == (other.shape, other.dtype)
        and one.untyped_storage().nbytes() == one.nbytes
    )


@functools.cache
def _is_view(function: Operator) -> bool:
    """Does it return a part of what it was given? Of a deep-copied weight that seems a new storage."""
    aliases = [value.alias_info for value in schema_of(function).returns]
    return any(alias is not None and not alias.is_write for alias in aliases)
