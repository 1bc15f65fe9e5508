"""Batches of all rows at once: each row's own order, and where all rows read one table, one look-up in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from vivace.data.order import PassOrder, ordered
from vivace.errors import Refused
from vivace.sweeping.stacking.rows import Row
from vivace.sweeping.stacking.tables import Leaves, table_of
from vivace.tensors.trees import map_tensors, outline, tensors

MOST_COMMON = 32  # orders of epochs that are kept for other rows


class _Order(NamedTuple):
    """The indices of an epoch's batches, one after another, (samples,), and how many each batch has."""

    sizes: list[int]
    indices: torch.Tensor


class Feed:
    """Feeds rows side by side, each from its own epoch on.

    Of a `TensorDataset` with torch's own collation the samples are looked up without a loader: those are the
    same numbers. Where rows hold equal tables, in one table for all.
    """

    def __init__(self) -> None:
        self._tables: dict[int, Leaves] = {}  # by the number of the row
        self._shared: Leaves | None = None
        self._orders: dict[int, tuple[int, _Order]] = {}  # of which epoch, by the number of the row
        self._told: dict[int, list[Any]] = {}  # what is told the epoch, by the number of the row
        self._common: dict[tuple[Any, ...], _Order] = {}  # of all rows of a seed, by what it depends on
        self.like: Any = None  # a batch of one row, whose leaves are those of every batch

    def enter(self, row: Row) -> None:
        """A row comes; its first batch shows what batches consist of. Raises Refused where they cannot be
        stacked, or the row would tell another one's data its own epoch.
        """
        told = _told_epochs(row.loader)
        shared = [one for some in self._told.values() for one in some if any(one is own for own in told)]
        if shared:
            kind = type(shared[0]).__name__
            raise Refused(
                f"its {kind} is told the epoch (set_epoch), and all runs hold the same one: make it in the "
                "Job's data, so that each run has its own"
            )
        batch = next(row.batches(row.epoch), None)
        if batch is None:
            raise Refused("the data gave no batch")
        if self.like is None:
            self.like = batch
        if outline(batch) != outline(self.like):
            raise Refused("its batches are built otherwise than those of the other runs")
        self._told[row.number] = told
        table = table_of(row.loader)
        if table is None:
            self._tables, self._shared = {}, None
            return
        known = self._shared
        if known is None and not self._tables:
            self._shared = known = tuple(tensor.to(row.device) for tensor in table)
        self._tables[row.number] = known if known is not None and _equal(known, table) else table

    def leave(self, row: Row) -> None:
        """Forget the data of a row whose trial has ended."""
        self._tables.pop(row.number, None)
        self._orders.pop(row.number, None)
        self._told.pop(row.number, None)

    def workers_of(self, row: Row) -> int:
        """How many processes of its own the row's loader reads with."""
        return 0 if row.number in self._tables else int(getattr(row.loader, "num_workers", 0))

    def epoch(self, rows: Sequence[Row]) -> Iterator[Leaves]:
        """The leaves of the batches of one epoch of each row, stacked: (rows, ...).

        Raises Refused where the rows' batches differ in number or shape.
        """
        if all(row.number in self._tables for row in rows):
            yield from self._looked_up(rows)
            return
        for batches in zip_longest(*(row.batches(row.epoch) for row in rows), fillvalue=self):
            if any(batch is self for batch in batches):
                raise Refused("the runs have unequal numbers of batches")
            found = [tuple(tensors(batch)) for batch in batches]
            yield tuple(_stacked(leaves) for leaves in zip(*found, strict=True))

    def _order_of(self, row: Row) -> _Order:
        """That of the row's epoch, for which a proof asks before the training does."""
        epoch, known = self._orders.get(row.number, (-1, None))
        if known is not None and epoch == row.epoch:
            return known
        loader = ordered(row.loader, seed=row.seed, epoch=row.epoch)
        assert isinstance(loader, DataLoader)
        assert isinstance(loader.batch_sampler, PassOrder)
        key = loader.batch_sampler.told_by()
        order = self._common.get(key) if key is not None else None
        if order is None:
            order = _order([ticket[1:] for ticket in loader.batch_sampler])  # a seed comes first
        if key is not None:
            self._common[key] = order
            while len(self._common) > MOST_COMMON:
                del self._common[next(iter(self._common))]
        self._orders[row.number] = row.epoch, order
        return order

    def _looked_up(self, rows: Sequence[Row]) -> Iterator[Leaves]:
        orders = [self._order_of(row) for row in rows]
        sizes = orders[0].sizes
        if any(order.sizes != sizes for order in orders):
            raise Refused("the runs have unequal numbers or sizes of batches")
        indices = torch.stack([order.indices for order in orders]).to(rows[0].device)
        tables = [self._tables[row.number] for row in rows]
        shared = all(table is self._shared for table in tables)
        begin = 0
        for size in sizes:
            chosen = indices[:, begin : begin + size]
            begin += size
            if shared:
                yield tuple(tensor[chosen].contiguous() for tensor in tables[0])
                continue
            parts = [tuple(t[own] for t in table) for table, own in zip(tables, chosen, strict=True)]
            yield tuple(torch.stack(leaves).to(indices.device) for leaves in zip(*parts, strict=True))


def rebuilt(like: object, leaves: Sequence[Any]) -> Any:
    """A batch built like `like`, of other tensors."""
    following = iter(leaves)
    return map_tensors(like, lambda _: next(following))


def _told_epochs(loader: Any) -> list[Any]:
    """What of a loader is told the epoch: itself, its dataset and samplers, and what these may pass it to."""
    parts = [loader, *getattr(loader, "__dict__", {}).values()]
    found = [part for part in parts if hasattr(part, "set_epoch")]
    inside = [value for part in found for value in getattr(part, "__dict__", {}).values()]
    return found + [part for part in inside if hasattr(part, "set_epoch")]


def _order(batches: Sequence[Sequence[int]]) -> _Order:
    return _Order([len(batch) for batch in batches], torch.tensor([i for batch in batches for i in batch]))


def _equal(known: Leaves, table: Leaves) -> bool:
    return len(known) == len(table) and all(
        a.shape == b.shape and (a.data_ptr() == b.data_ptr() or torch.equal(a, b.to(a.device)))
        for a, b in zip(known, table, strict=True)
    )


def _stacked(leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    if len({leaf.shape for leaf in leaves}) > 1:
        raise Refused("the runs' batches have unequal shapes")
    return torch.stack(list(leaves))
