"""Bytes of a step whose elementwise and norm kernels are fused, as a compiler would fuse them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vivace.work.kernel import Kernel

FUSABLE = ("elementwise", "norm")


def fused_bytes(kernels: Sequence[Kernel]) -> list[int]:
    """Bytes of each kernel where a fusable one joins the fusable producer of its input.

    Two join only at the same depth (matrix kernels before them on the longest path), which rules out cycles,
    and in the same phase. Inside a group a value is read once at most, and written only for others.
    """
    depth: dict[int, int] = {}
    group: dict[int, int] = {}
    members: list[int] = []
    for number, kernel in enumerate(kernels):
        fusable = kernel.operator in FUSABLE
        level = max((depth.get(a.value, 0) for a in kernel.reads), default=0)
        joined = number
        for access in kernel.reads:
            producer = group.get(access.value)
            if fusable and producer is not None and depth[access.value] == level:
                same_phase = kernels[producer].phase == kernel.phase
                joined = producer if same_phase else joined
        members.append(joined)
        for access in kernel.writes:
            depth[access.value] = level if fusable else level + 1
            if fusable:
                group[access.value] = joined
    wanted: dict[int, set[int]] = defaultdict(set)
    for number, kernel in enumerate(kernels):
        for access in kernel.reads:
            wanted[access.value].add(members[number])
    result = []
    read: set[tuple[int, int]] = set()
    for number, kernel in enumerate(kernels):
        own, total = members[number], 0
        if kernel.operator not in FUSABLE:
            result.append(kernel.bytes)
            continue
        for access in kernel.reads:
            if group.get(access.value) != own and (own, access.value) not in read:
                total += kernel.passes * access.bytes
                read.add((own, access.value))
        result.append(total + sum(a.bytes for a in kernel.writes if wanted[a.value] != {own}))
    return result
