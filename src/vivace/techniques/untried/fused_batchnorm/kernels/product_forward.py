"""A matrix product in Triton whose programs leave the statistics of what they write, channel by channel.

A program goes down the rows of a split, tile by tile: fp32 sums of a tile's product, rounded once to the
output's type; mean and squared deviations of those numbers, combined with the tiles before by Chan's formula.
The order is fixed, so that equal inputs give equal bits. `product` holds the reference.
Source: Chan, Golub, LeVeque 1983 (combining variances).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from vivace.techniques.untried.fused_batchnorm.kernels.splits import split_rows, tile_of
from vivace.techniques.untried.fused_batchnorm.kernels.tiles import FUSED_MULTIPLY_ADD, on_device_of

DEPTH_BYTES = 128  # of a row at a time
WARPS = 8


@triton.jit
def statistics_mm(
    x_ptr,
    weight_ptr,
    y_ptr,
    means_ptr,
    squares_ptr,
    num_rows,
    rows_a_split,
    inner_eighths,
    eighths,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of columns over one split of the rows."""
    inner, width = inner_eighths * 8, eighths * 8
    split = tl.program_id(1)
    begin = split * rows_a_split
    count = tl.minimum(rows_a_split, num_rows - begin)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    rows = tl.arange(0, ROWS)
    weights = weight_ptr + columns[None, :].to(tl.int64) * inner
    mean = tl.zeros([COLUMNS], tl.float32)
    squares = tl.zeros([COLUMNS], tl.float32)
    for tile in range(tl.cdiv(count, ROWS)):
        first = begin + tile * ROWS
        there = rows < count - tile * ROWS
        inputs = x_ptr + first.to(tl.int64) * inner + rows[:, None] * inner
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, inner, DEPTH):
            depth = start + tl.arange(0, DEPTH)
            within = depth < inner
            x = tl.load(inputs + depth[None, :], mask=there[:, None] & within[None, :], other=0)
            weight = tl.load(weights + depth[:, None], mask=within[:, None] & inside[None, :], other=0)
            total = tl.dot(x, weight, total, input_precision=PRECISION)
        rounded = total.to(y_ptr.dtype.element_ty)
        outputs = y_ptr + first.to(tl.int64) * width + (rows[:, None] * width + columns[None, :])
        tl.store(outputs, rounded, mask=there[:, None] & inside[None, :])
        y = rounded.to(tl.float32)
        seen = 1.0 * tile * ROWS
        fresh = tl.minimum(count - tile * ROWS, ROWS) * 1.0
        here = tl.sum(y, axis=0) / fresh  # rows beyond the end are zero
        apart = tl.where(there[:, None], y - here[None, :], 0.0)
        further = here - mean
        mean += further * (fresh / (seen + fresh))
        squares += tl.sum(apart * apart, axis=0) + further * further * (seen * fresh / (seen + fresh))
    tl.store(means_ptr + split * width + columns, mean, mask=inside)
    tl.store(squares_ptr + split * width + columns, squares, mask=inside)


def forward(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel on contiguous matrices (rows, inner) and (width, inner), both multiples of 8.

    Returns (rows, width) and the statistics. Numbers of 32 bits are rounded to TF32 where convolutions may.
    """
    (num_rows, inner), width = x.shape, len(weight)
    (rows, columns), rows_a_split = tile_of(width), split_rows(num_rows, width)
    num_splits = triton.cdiv(num_rows, rows_a_split)
    y = x.new_empty(num_rows, width)
    statistics = x.new_empty(2, num_splits, width, dtype=torch.float32)
    backends: Any = torch.backends
    with on_device_of(x):
        statistics_mm[(triton.cdiv(width, columns), num_splits)](
            *(x, weight, y, statistics[0], statistics[1], num_rows, rows_a_split),
            *(inner // 8, width // 8),
            ROWS=rows,
            COLUMNS=columns,
            DEPTH=DEPTH_BYTES // x.element_size(),
            PRECISION="tf32" if backends.cudnn.conv.fp32_precision == "tf32" else "ieee",
            num_warps=WARPS,
            **FUSED_MULTIPLY_ADD,
        )
    return y, statistics
