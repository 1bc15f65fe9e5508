"""A model of PyTorch's CUDA caching allocator: what a sequence of allocations reserves on a device.

Sizes are rounded up to 512 bytes and served from free blocks, best fit first; where none fits, a segment is
reserved: 2 MiB for up to 1 MiB, 20 MiB for up to 10 MiB, else the size rounded up to 2 MiB. What is left of a
block is split off; freed neighbours join. Source: c10/cuda/CUDACachingAllocator.cpp in PyTorch 2.11 to 2.15.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable

KIB, MIB = 2**10, 2**20
ROUNDING = 512
SMALL = 1 * MIB  # the largest size of the small pool, and the least that is split off in the large one
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
OWN_SEGMENT = 10 * MIB  # from this size on a segment holds one size
SEGMENT_ROUNDING = 2 * MIB


@dataclasses.dataclass(frozen=True)
class Reserved:
    """Peaks in bytes: what was asked for, what blocks were handed out for it, and what was reserved."""

    requested: int
    allocated: int
    reserved: int


@dataclasses.dataclass(eq=False)
class _Block:
    size: int
    small: bool
    free: bool = True
    before: _Block | None = None
    after: _Block | None = None


class CachingAllocator:
    """Serves `allocate` and `free` by key, and keeps the peaks."""

    def __init__(self) -> None:
        self.requested = self.allocated = self.reserved = 0
        self.peak = Reserved(0, 0, 0)
        self._used: dict[int, tuple[_Block, int]] = {}
        self._free: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}

    def allocate(self, key: int, num_bytes: int) -> None:
        """Reserve room for `num_bytes` under `key`; nothing for zero bytes."""
        size = max(ROUNDING, _up(num_bytes, ROUNDING)) if num_bytes else 0
        if not size:
            return
        small = size <= SMALL
        block = self._best_fit(size, small) or self._segment(size, small)
        rest = block.size - size
        if rest >= ROUNDING if small else rest > SMALL:
            self._split(block, size)
        block.free = False
        self._used[key] = block, num_bytes
        self.requested += num_bytes
        self.allocated += block.size
        highest = self.peak
        self.peak = Reserved(
            max(highest.requested, self.requested),
            max(highest.allocated, self.allocated),
            max(highest.reserved, self.reserved),
        )

    def free(self, key: int) -> None:
        """Give back what `key` holds, if anything."""
        if key not in self._used:
            return
        block, num_bytes = self._used.pop(key)
        self.requested -= num_bytes
        self.allocated -= block.size
        block.free = True
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._take(neighbour)
                block.size += neighbour.size
                if neighbour is block.before:
                    block.before = neighbour.before
                    if block.before is not None:
                        block.before.after = block
                else:
                    block.after = neighbour.after
                    if block.after is not None:
                        block.after.before = block
        self._put(block)

    def _segment(self, size: int, small: bool) -> _Block:
        if small:
            room = SMALL_SEGMENT
        else:
            room = LARGE_SEGMENT if size < OWN_SEGMENT else _up(size, SEGMENT_ROUNDING)
        self.reserved += room
        return _Block(room, small)

    def _best_fit(self, size: int, small: bool) -> _Block | None:
        pool = self._free[small]
        at = bisect.bisect_left(pool, (size, -1))
        return pool.pop(at)[2] if at < len(pool) else None

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.size - size, block.small, True, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.size, block.after = size, rest
        self._put(rest)

    def _put(self, block: _Block) -> None:
        bisect.insort(self._free[block.small], (block.size, id(block), block))

    def _take(self, block: _Block) -> None:
        pool = self._free[block.small]
        del pool[bisect.bisect_left(pool, (block.size, id(block)))]


def simulate(moves: Iterable[tuple[int, int]]) -> Reserved:
    """The peaks of a sequence of ``(key, bytes)`` allocations and ``(key, -bytes)`` releases."""
    allocator = CachingAllocator()
    for key, num_bytes in moves:
        if num_bytes >= 0:
            allocator.allocate(key, num_bytes)
        else:
            allocator.free(key)
    return allocator.peak


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
