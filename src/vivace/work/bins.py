"""Kernels as a few bins: what is needed to predict a step on another card. Imports no torch.

A bin holds kernels of one kind, of similar size and similar operations per byte, since time on a card depends
on both.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from vivace.operators import MATRIX_KINDS

if TYPE_CHECKING:
    from vivace.work.kernel import Access, Kernel

# Channels in a group for which libraries have their own kernels; others are irregular.
REGULAR_WIDTHS = (2, 4, 8, 16, 32)
COPIES = re.compile("copy|clone|contiguous")
# Counted as in the shipped table of models, to which the efficiencies are fitted.
OTHERS = re.compile("embedding|linalg_vector_norm")
STREAMS = re.compile("(^|_)(cat|stack|zeros|ones|full|fill|zero)(_|$)")
SIZE_OCTAVES, INTENSITY_OCTAVES, WEIGHTS_PER_SAMPLE = 6, 2, 64

# Kind, number of kernels, operations per sample, bytes per sample in fp32, bytes that do not grow with the
# batch.
Bin = tuple[str, int, float, float, float]


def bins_of(kernels: Sequence[Kernel], batch: float) -> list[Bin]:
    """The bins of a step counted at one batch size; every byte is taken to grow with it.

    The bytes are those of fp32 tensors, also where the step was counted in another precision.
    """
    double = item_bytes_of(kernels) == 8
    return gather([(kind_of(k), k.flops / batch, _as_fp32(k, double) / batch, 0.0) for k in kernels])


def item_bytes_of(kernels: Sequence[Kernel]) -> int:
    """The size of a number in most of the operations: 8, 4 or 2 bytes; 4 where there are none."""
    flops: Counter[int] = Counter()
    for kernel in kernels:
        if kernel.flops and kernel.reads and kernel.reads[0].number_bytes in (2, 4, 8):
            flops[kernel.reads[0].number_bytes] += kernel.flops
    return flops.most_common(1)[0][0] if flops else 4


def _as_fp32(kernel: Kernel, double: bool) -> int:
    """Bytes that a kernel would move with numbers of four bytes; what counts or selects stays as it is."""

    def moved(accesses: Sequence[Access]) -> int:
        return sum(a.bytes * 4 // a.number_bytes if a.number_bytes in floats else a.bytes for a in accesses)

    floats = (2, 8) if double else (2,)  # in other steps, numbers of eight bytes are labels and places
    return kernel.passes * moved(kernel.reads) + moved(kernel.writes)


def gather(parts: Iterable[tuple[str, float, float, float]]) -> list[Bin]:
    """Bins of kernels: kind, operations and bytes per sample, and bytes that do not grow with the batch."""
    found: dict[tuple[str, int, int], list[float]] = {}
    for kind, flops, growing, constant in parts:
        size = growing + constant / WEIGHTS_PER_SAMPLE
        intensity = (
            math.log2(flops / size) / INTENSITY_OCTAVES if kind in MATRIX_KINDS and flops and size else 0
        )
        sums = found.setdefault(
            (kind, round(math.log2(size + 1) / SIZE_OCTAVES), round(intensity)), [0, 0, 0, 0]
        )
        for place, value in enumerate((1, flops, growing, constant)):
            sums[place] += value
    return [
        (kind, int(n), flops, growing, constant)
        for (kind, *_), (n, flops, growing, constant) in found.items()
    ]


def kind_of(kernel: Kernel) -> str:
    """The kind of a kernel, one of its class's: finer where classes hide different speeds."""
    name, operator = kernel.name, kernel.operator
    if operator == "convolution":
        if kernel.groups == 1:
            return "conv" if kernel.window > 1 else "pointwise"
        if kernel.width == 1:
            return "depthwise"
        return "grouped" if kernel.width in REGULAR_WIDTHS else "irregular"
    if operator == "matmul":
        return "batched" if "bmm" in name else "matmul"
    if operator == "norm":
        return "batch_norm" if "batch_norm" in name else "layer_norm"
    if OTHERS.search(name):
        return "other"
    if operator == "memory":
        return "copy" if COPIES.search(name) else "elementwise" if STREAMS.search(name) else "memory"
    return "softmax" if "softmax" in name else operator
