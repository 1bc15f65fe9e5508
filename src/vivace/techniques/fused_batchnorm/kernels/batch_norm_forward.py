"""Training BatchNorm, residual add and activation, forward, in Triton: two reads of the input.

The first sums fp32 statistics: Welford inside a split of the rows, then Chan's formula over the splits, in a
fixed order, so that equal inputs give equal bits. The second normalises, adds and activates; a ReLU leaves
one bit an element. `vivace.techniques.fused_batchnorm.kernels.batch_norm` holds the reference.
Sources: https://arxiv.org/abs/1502.03167 (BatchNorm), Chan, Golub, LeVeque 1983 (combining variances).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vivace.techniques.fused_batchnorm.kernels.tiles import (
    APPLY_WARPS,
    FINISH_COLUMNS,
    FINISH_SPLITS,
    FUSED_MULTIPLY_ADD,
    JOINED_WARPS,
    SUM_WARPS,
    Tiles,
    bytes_of_row,
    on_device_of,
    scale_and_bias,
    splits_from,
    store_bits,
    tile_of_program,
    true_width,
)


@triton.jit
def batch_norm_statistics(
    x_ptr,
    means_ptr,
    squares_ptr,
    num_rows,
    rows_a_split,
    width,
    eighths,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Mean and sum of squared deviations of each channel over each split of the rows."""
    width = true_width(width, eighths, ALIGNED)
    split = tl.program_id(1)
    first = split * rows_a_split
    count = tl.minimum(rows_a_split, num_rows - first)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    rows = tl.arange(0, ROWS)
    pointers = x_ptr + first.to(tl.int64) * width + (rows[:, None] * width + columns[None, :])
    mean = tl.zeros([ROWS, COLUMNS], tl.float32)
    squares = tl.zeros([ROWS, COLUMNS], tl.float32)
    num_full = count // ROWS
    for tile in range(num_full):
        x = tl.load(pointers, mask=inside[None, :], other=0).to(tl.float32)
        deviation = x - mean
        mean += deviation * (1.0 / (tile + 1))
        squares += deviation * (x - mean)
        pointers += ROWS * width
    more = rows < count - num_full * ROWS
    x = tl.load(pointers, mask=more[:, None] & inside[None, :], other=0).to(tl.float32)
    deviation = tl.where(more[:, None], x - mean, 0.0)
    mean += deviation * (1.0 / (num_full + 1))
    squares += deviation * (x - mean)
    counts = (num_full + more.to(tl.int32)).to(tl.float32)[:, None]
    whole = tl.sum(mean * counts, axis=0) / count
    apart = mean - whole[None, :]
    squares += apart * apart * counts
    tl.store(means_ptr + split * width + columns, whole, mask=inside)
    tl.store(squares_ptr + split * width + columns, tl.sum(squares, axis=0), mask=inside)


@triton.jit
def batch_norm_finish(
    means_ptr,
    squares_ptr,
    running_mean_ptr,
    running_variance_ptr,
    mean_ptr,
    rstd_ptr,
    num_rows,
    rows_a_split,
    num_splits,
    width,
    epsilon,
    momentum,
    TRACKED: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One mean and one reciprocal standard deviation a channel; running statistics follow PyTorch's rule."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    total = tl.zeros([SPLITS, COLUMNS], tl.float32)
    for start in range(0, num_splits, SPLITS):
        splits, there, offsets = splits_from(start, num_splits, columns, inside, width, SPLITS)
        counts = tl.minimum(rows_a_split, num_rows - splits * rows_a_split).to(tl.float32)
        total += tl.load(means_ptr + offsets, mask=there, other=0) * counts[:, None]
    mean = tl.sum(total, axis=0) / num_rows
    total = tl.zeros([SPLITS, COLUMNS], tl.float32)
    for start in range(0, num_splits, SPLITS):
        splits, there, offsets = splits_from(start, num_splits, columns, inside, width, SPLITS)
        counts = tl.minimum(rows_a_split, num_rows - splits * rows_a_split).to(tl.float32)
        apart = tl.load(means_ptr + offsets, mask=there, other=0) - mean[None, :]
        squares = tl.load(squares_ptr + offsets, mask=there, other=0)
        total += tl.where(there, squares + apart * apart * counts[:, None], 0.0)
    squares = tl.sum(total, axis=0)
    tl.store(mean_ptr + columns, mean, mask=inside)
    tl.store(rstd_ptr + columns, 1 / tl.sqrt(squares / num_rows + epsilon), mask=inside)
    if TRACKED:
        before = tl.load(running_mean_ptr + columns, mask=inside).to(tl.float32)
        after = momentum * mean + (1 - momentum) * before
        tl.store(running_mean_ptr + columns, after.to(running_mean_ptr.dtype.element_ty), mask=inside)
        before = tl.load(running_variance_ptr + columns, mask=inside).to(tl.float32)
        after = momentum * (squares / (num_rows - 1)) + (1 - momentum) * before
        tl.store(running_variance_ptr + columns, after.to(running_variance_ptr.dtype.element_ty), mask=inside)


@triton.jit
def batch_norm_apply(
    x_ptr,
    residual_ptr,
    y_ptr,
    mask_ptr,
    mean_ptr,
    rstd_ptr,
    weight_ptr,
    bias_ptr,
    other_mean_ptr,
    other_rstd_ptr,
    other_weight_ptr,
    other_bias_ptr,
    num_rows,
    width,
    eighths,
    ALIGNED: tl.constexpr,
    AFFINE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Normalise, add the residual, through its own norm if it has one, activate; one tile a program."""
    width = true_width(width, eighths, ALIGNED)
    row_bytes = bytes_of_row(width, eighths, ALIGNED)
    tile = tile_of_program(num_rows, width, ROWS, COLUMNS)
    first, first_column, columns, inside, there, start, offsets = tile
    x = tl.load(x_ptr + start + offsets, mask=there, other=0).to(tl.float32)
    mean = tl.load(mean_ptr + columns, mask=inside, other=0)
    rstd = tl.load(rstd_ptr + columns, mask=inside, other=0)
    scale, bias = scale_and_bias(rstd, weight_ptr, bias_ptr, columns, inside, AFFINE)
    z = (x - mean[None, :]) * scale[None, :] + bias[None, :]
    if RESIDUAL:
        residual = tl.load(residual_ptr + start + offsets, mask=there, other=0).to(tl.float32)
        if other_mean_ptr is not None:
            mean = tl.load(other_mean_ptr + columns, mask=inside, other=0)
            rstd = tl.load(other_rstd_ptr + columns, mask=inside, other=0)
            scale, bias = scale_and_bias(rstd, other_weight_ptr, other_bias_ptr, columns, inside, AFFINE)
            residual = (residual - mean[None, :]) * scale[None, :] + bias[None, :]
        z += residual
    if ACTIVATION == "relu" or ACTIVATION == "relu6":
        negative = z <= 0  # false for NaN, which has to stay
        kept = negative == 0
        z = tl.where(negative, 0.0, z)
        if ACTIVATION == "relu6":
            kept = kept & (z < 6)
            z = tl.where(z > 6, 6.0, z)
        store_bits(mask_ptr, kept & there, first, first_column, num_rows, row_bytes, ROWS, COLUMNS)
    elif ACTIVATION == "silu":
        z = z / (1 + tl.exp(-z))
    elif ACTIVATION == "hardswish":
        z = z * tl.minimum(tl.maximum(z + 3, 0.0), 6.0) / 6
    tl.store(y_ptr + start + offsets, z.to(y_ptr.dtype.element_ty), mask=there)


def moments(
    x: torch.Tensor | None,
    statistics: torch.Tensor | None,
    num_rows: int,
    rows_a_split: int,
    running_mean: torch.Tensor | None,
    running_variance: torch.Tensor | None,
    momentum: float,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and reciprocal deviation a channel, of a matrix of pixels by channels or of its statistics.

    Launches two kernels, or where the statistics of splits of the rows are there, one; running statistics
    change in place.
    """
    if statistics is None:
        assert x is not None
        width = x.shape[1]
        tiles = Tiles.of(num_rows, width, x.device)
        rows_a_split = tiles.rows_a_split
        statistics = x.new_empty((2, tiles.num_splits, width), dtype=torch.float32)
        with on_device_of(x):
            batch_norm_statistics[(tiles.num_columns, tiles.num_splits)](
                *(x, statistics[0], statistics[1], num_rows, rows_a_split, width, width // 8),
                **tiles.constants(width),
                num_warps=SUM_WARPS,
                **FUSED_MULTIPLY_ADD,
            )
    _, num_splits, width = statistics.shape
    mean, rstd = (statistics.new_empty(width) for _ in range(2))
    with on_device_of(statistics):
        batch_norm_finish[(triton.cdiv(width, FINISH_COLUMNS),)](
            *(statistics[0], statistics[1], running_mean, running_variance, mean, rstd),
            *(num_rows, rows_a_split, num_splits, width, epsilon, momentum),
            TRACKED=running_mean is not None,
            SPLITS=FINISH_SPLITS,
            COLUMNS=FINISH_COLUMNS,
            **FUSED_MULTIPLY_ADD,
        )
    return mean, rstd


def apply(
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    other: list[torch.Tensor],
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and bit mask (no rows without a ReLU); `other` holds what mean to bias are, of the residual."""
    num_rows, width = x.shape
    tiles = Tiles.of(num_rows, width, x.device)
    output = torch.empty_like(
        x, dtype=x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    )
    masked = activation in ("relu", "relu6")
    mask = x.new_empty((num_rows if masked else 0, (width + 7) // 8), dtype=torch.uint8)
    with on_device_of(x):
        batch_norm_apply[(tiles.num_tiles(num_rows),)](
            *(x, residual, output, mask, mean, rstd, weight, bias, *(*other, *(None,) * 4)[:4]),
            *(num_rows, width, width // 8),
            **tiles.constants(width),
            AFFINE=weight is not None,
            RESIDUAL=residual is not None,
            ACTIVATION=activation,
            num_warps=JOINED_WARPS if other else APPLY_WARPS,
            **FUSED_MULTIPLY_ADD,
        )
    return output, mask
