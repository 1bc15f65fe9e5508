"""Trees of tensors: batches in tuples, lists, mappings and dataclasses."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import UserDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch.nn.utils.rnn import PackedSequence

Tree: TypeAlias = object
"""Tensors in any containers, as batches are (`vivace.job.Batch`), and whatever else stands among them."""

Digest = tuple[str, ...]  # of each tensor of a batch


def map_tensors(batch: Tree, function: Callable[[torch.Tensor], Any]) -> Any:
    """A copy of `batch` with `function` applied to each tensor in tuples, lists, mappings and dataclasses."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, PackedSequence):  # whose lengths stay on the CPU
        return _mapped_sequence(batch, function)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(item, function) for item in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(map_tensors(item, function) for item in batch)
    if isinstance(batch, defaultdict):
        entries = {key: map_tensors(value, function) for key, value in batch.items()}
        return defaultdict(batch.default_factory, entries)
    if isinstance(batch, dict):
        return type(batch)({key: map_tensors(value, function) for key, value in batch.items()})
    if isinstance(batch, UserDict):  # such as transformers' BatchEncoding
        return type(batch)({key: map_tensors(value, function) for key, value in batch.items()})
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {
            f.name: map_tensors(getattr(batch, f.name), function) for f in dataclasses.fields(batch) if f.init
        }
        return dataclasses.replace(batch, **fields)
    return batch


def _mapped_sequence(batch: PackedSequence, function: Callable[[torch.Tensor], Any]) -> PackedSequence:
    data = function(batch.data)
    orders = [
        None if one is None else one.to(data.device) for one in (batch.sorted_indices, batch.unsorted_indices)
    ]
    return PackedSequence(data, batch.batch_sizes, *orders)


def tensors(batch: Tree) -> Iterator[torch.Tensor]:
    """Every tensor of a batch, depth first."""
    if isinstance(batch, torch.Tensor):
        yield batch
        return
    parts: Iterable[Any] = ()
    if isinstance(batch, (tuple, list)):
        parts = batch
    elif isinstance(batch, (dict, UserDict)):
        parts = batch.values()
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        parts = (getattr(batch, field.name) for field in dataclasses.fields(batch) if field.init)
    for part in parts:
        yield from tensors(part)


def cast(batch: Tree, before: torch.dtype, after: torch.dtype) -> Any:
    """A copy of `batch` in which tensors of dtype `before` have dtype `after`."""
    return map_tensors(batch, lambda tensor: tensor.to(after) if tensor.dtype == before else tensor)


def batch_size(batch: Tree) -> int:
    """Samples in a batch: the length of its first tensor that has a dimension, else 1."""
    return next((int(t.shape[0]) for t in tensors(batch) if t.dim()), 1)


def split(batch: Tree, size: int) -> list[Any]:
    """Cut a batch into pieces of at most `size` samples; tensors of another length stand in every piece."""
    total = batch_size(batch)

    def piece(start: int) -> Any:
        return map_tensors(batch, lambda t: t[start : start + size] if t.dim() and t.shape[0] == total else t)

    return [piece(start) for start in range(0, total, size)]


def joined(batches: Sequence[Any]) -> Any:
    """One batch of several, the inverse of `split`; None where their tensors differ in shape or number."""
    total, found = batch_size(batches[0]), [list(tensors(batch)) for batch in batches]
    if len({tuple((t.shape[1:], t.dtype) for t in each) for each in found}) > 1:
        return None
    rows = iter(zip(*found, strict=True))

    def join(first: torch.Tensor) -> torch.Tensor:
        group = next(rows)
        return torch.cat(group) if first.dim() and first.shape[0] == total else first

    return map_tensors(batches[0], join)


def digest(batch: Tree) -> Digest:
    """A digest of each tensor of a batch: of its dtype, its shape and its bytes."""
    return tuple(_of_tensor(tensor) for tensor in tensors(batch))


def _of_tensor(tensor: torch.Tensor) -> str:
    plain = tensor.detach().cpu()
    if plain.layout != torch.strided:
        plain = plain.to_dense()
    content = plain.contiguous().flatten().view(torch.uint8) if plain.numel() else plain
    head = f"{plain.dtype} {tuple(plain.shape)} ".encode()
    return hashlib.sha256(head + content.resolve_conj().numpy().tobytes()).hexdigest()[:20]
