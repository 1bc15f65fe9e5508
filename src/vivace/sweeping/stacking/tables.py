"""Samples that lie in tensors: batches are looked up, without a loader that collects them one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset, default_collate

Leaves = tuple[torch.Tensor, ...]


def table_of(loader: Any) -> Leaves | None:
    """All samples of a loader whose batches are look-ups in them; None where they may be more than that."""
    plain = (
        type(loader) is DataLoader
        and type(loader.dataset) is TensorDataset
        and loader.collate_fn is default_collate
        and type(loader.batch_sampler) is BatchSampler
    )
    return tuple(loader.dataset.tensors) if plain else None


def in_order(loader: Any) -> Iterable[list[torch.Tensor]] | None:
    """What such a loader gives without shuffling: the same numbers in the same batches; None for others."""
    table = table_of(loader)
    if table is None or type(loader.batch_sampler.sampler) is not SequentialSampler:
        return None
    return _cut(table, loader.batch_sampler)


def _cut(table: Leaves, batches: Iterable[list[int]]) -> Iterator[list[torch.Tensor]]:
    for indices in batches:  # copied: a metric may write in them
        parts = (tensor[indices[0] : indices[-1] + 1] for tensor in table)
        yield [part.clone(memory_format=torch.contiguous_format) for part in parts]
