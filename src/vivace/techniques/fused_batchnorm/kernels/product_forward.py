"""A matrix product in Triton whose programs leave the statistics of what they write, channel by channel.

A program goes down the rows of a split, tile by tile: fp32 sums of a tile's product, rounded once to the
output's type; mean and squared deviations of those numbers by Welford's rule for each place of a tile, and at
the end by Chan's formula over the places. The order is fixed, so that equal inputs give equal bits. `product`
holds the reference.
Source: Chan, Golub, LeVeque 1983 (combining variances).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from vivace.techniques.fused_batchnorm.kernels.splits import split_rows, tile_of
from vivace.techniques.fused_batchnorm.kernels.tiles import FUSED_MULTIPLY_ADD, on_device_of

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
    offsets = rows[:, None] * width + columns[None, :]
    weights = weight_ptr + columns[None, :].to(tl.int64) * inner
    trips = tl.cdiv(inner, DEPTH)
    mean, squares = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(
        tl.cdiv(count, ROWS) * trips
    ):  # one loop: a tile's last numbers and the next one's first
        tile, trip = step // trips, step % trips  # are under way together
        first = (begin + tile * ROWS).to(tl.int64)
        there = rows < count - tile * ROWS
        depth = trip * DEPTH + tl.arange(0, DEPTH)
        within = depth < inner
        inputs = x_ptr + first * inner + (rows[:, None] * inner + depth[None, :])
        x = tl.load(inputs, mask=there[:, None] & within[None, :], other=0)
        weight = tl.load(weights + depth[:, None], mask=within[:, None] & inside[None, :], other=0)
        total = tl.dot(x, weight, total, input_precision=PRECISION)
        if trip == trips - 1:
            rounded = total.to(y_ptr.dtype.element_ty)
            tl.store(y_ptr + first * width + offsets, rounded, mask=there[:, None] & inside[None, :])
            y = rounded.to(tl.float32)
            deviation = tl.where(there[:, None], y - mean, 0.0)
            mean += deviation * (1.0 / (tile + 1))
            squares += deviation * (y - mean)
            total = tl.zeros([ROWS, COLUMNS], tl.float32)
    counts = ((count - rows + ROWS - 1) // ROWS).to(tl.float32)[:, None]  # of tiles that have the row
    whole = tl.sum(mean * counts, axis=0) / count
    apart = mean - whole[None, :]
    squares += apart * apart * counts
    tl.store(means_ptr + split * width + columns, whole, mask=inside)
    tl.store(squares_ptr + split * width + columns, tl.sum(squares, axis=0), mask=inside)


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
