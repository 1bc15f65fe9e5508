"""A model of PyTorch's CUDA caching allocator: what a sequence of allocations reserves on a device.

Sizes are rounded up to 512 bytes and served from free blocks, best fit first; where none fits, a segment is
reserved: 2 MiB for up to 1 MiB, 20 MiB for up to 10 MiB, else the size rounded up to 2 MiB. What is left of a
block is split off; freed neighbours join. Of blocks of one size that in the oldest segment is taken, and no
stream gets a block of another one; before PyTorch 2.15 that is the first in memory, which is the same where
segments follow each other there. Source: c10/cuda/CUDACachingAllocator.cpp in PyTorch 2.11 to 2.15.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import TypeAlias

KIB, MIB = 2**10, 2**20
ROUNDING = 512
SMALL = 1 * MIB  # the largest size of the small pool, and the least that is split off in the large one
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
OWN_SEGMENT = 10 * MIB  # from this size on a segment holds one size
SEGMENT_ROUNDING = 2 * MIB


_Pool: TypeAlias = tuple[int, bool]  # the number of the stream; is it that of small sizes?


@dataclasses.dataclass(eq=False)
class _Block:
    size: int
    pool: _Pool
    address: int
    free: bool = True
    before: _Block | None = None
    after: _Block | None = None


class CachingAllocator:
    """Serves `allocate` and `free` by key. What is `reserved`, in bytes, stays so."""

    def __init__(self) -> None:
        self.reserved = 0
        self._used: dict[int, _Block] = {}
        self._free: dict[_Pool, list[tuple[int, int, _Block]]] = defaultdict(list)

    def allocate(self, key: int, num_bytes: int, stream: int = 0) -> None:
        """Reserve room for `num_bytes` under `key`, from the pool of a stream; nothing for zero bytes."""
        size = max(ROUNDING, _up(num_bytes, ROUNDING)) if num_bytes else 0
        if not size:
            return
        small = size <= SMALL
        pool = stream, small
        block = self._best_fit(size, pool) or self._segment(size, pool)
        rest = block.size - size
        if rest >= ROUNDING if small else rest > SMALL:
            self._split(block, size)
        block.free = False
        self._used[key] = block

    def free(self, key: int) -> None:
        """Give back what `key` holds, if anything."""
        if key not in self._used:
            return
        block = self._used.pop(key)
        block.free = True
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._take(neighbour)
                block.size += neighbour.size
                if neighbour is block.before:
                    block.address, block.before = neighbour.address, neighbour.before
                    if block.before is not None:
                        block.before.after = block
                else:
                    block.after = neighbour.after
                    if block.after is not None:
                        block.after.before = block
        self._put(block)

    def _segment(self, size: int, pool: _Pool) -> _Block:
        if size <= SMALL:
            room = SMALL_SEGMENT
        else:
            room = LARGE_SEGMENT if size < OWN_SEGMENT else _up(size, SEGMENT_ROUNDING)
        self.reserved += room
        return _Block(room, pool, self.reserved - room)

    def _best_fit(self, size: int, pool: _Pool) -> _Block | None:
        free = self._free[pool]
        at = bisect.bisect_left(free, (size, -1))
        return free.pop(at)[2] if at < len(free) else None

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.size - size, block.pool, block.address + size, True, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.size, block.after = size, rest
        self._put(rest)

    def _put(self, block: _Block) -> None:
        bisect.insort(self._free[block.pool], (block.size, block.address, block))

    def _take(self, block: _Block) -> None:
        free = self._free[block.pool]
        del free[bisect.bisect_left(free, (block.size, block.address))]


def simulate(moves: Iterable[tuple[int, int]], aside: Collection[int] = ()) -> int:
    """The bytes reserved after a sequence of ``(key, bytes)`` allocations and ``(key, -bytes)`` releases.

    The keys in `aside` are allocated on a stream of their own.
    """
    allocator = CachingAllocator()
    for key, num_bytes in moves:
        if num_bytes >= 0:
            allocator.allocate(key, num_bytes, int(key in aside))
        else:
            allocator.free(key)
    return allocator.reserved


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
