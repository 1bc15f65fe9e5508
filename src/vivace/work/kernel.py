"""One operator on the device and the tensors that it touches, as data."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Access:
    """One tensor that a kernel reads or writes: the value's number, its elements and their size in bytes, and
    of how many real numbers each element is made: two, where it is complex.
    """

    value: int
    num_elements: int
    item_bytes: int
    parts: int = 1

    @property
    def number_bytes(self) -> int:
        """The size of a real number, in which it is computed."""
        return self.item_bytes // self.parts

    @property
    def bytes(self) -> int:
        """Bytes that are read or written: elements times the size of one."""
        return self.num_elements * self.item_bytes


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One operator on the device: class, name, phase (forward, backward, update), operations, accesses.

    `passes` over the inputs; of a convolution its `groups`, the `width` in channels of one, and the `window`:
    how often it reads a place, at most once for a matrix product in disguise.
    """

    operator: str
    name: str
    phase: str
    flops: int
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    passes: int = 1
    groups: int = 1
    width: int = 0
    window: float = 0.0

    @property
    def bytes(self) -> int:
        """Bytes read and written, each pass over the inputs counted."""
        return self.passes * sum(a.bytes for a in self.reads) + sum(a.bytes for a in self.writes)
