"""The backward pass of BatchNorm, residual add and activation, in Triton: two reads of input and gradient.

The first sums the gradient before the activation and its products with the input, the second computes the
input's gradient from them. A ReLU's mask is one bit an element; smooth activations are computed again from
the input. `vivace.techniques.fused_batchnorm.kernels.batch_norm` holds the reference.
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
    GRADIENT_PROGRAMS,
    JOINED_WARPS,
    SUM_WARPS,
    Tiles,
    bytes_of_row,
    load_bits,
    on_device_of,
    scale_and_bias,
    split_of_program,
    splits_from,
    tile_of_program,
    true_width,
)


@triton.jit
def _through_activation(gradient, z, ACTIVATION: tl.constexpr):
    """The gradient at z of an activation that is computed again instead of remembered."""
    if ACTIVATION == "silu":
        sigmoid = 1 / (1 + tl.exp(-z))
        return gradient * sigmoid * (1 + z * (1 - sigmoid))
    else:
        slope = tl.where(z < -3, 0.0, tl.where(z <= 3, z / 3 + 0.5, 1.0))
        return gradient * slope


@triton.jit
def _before_activation(
    gradient_ptr,
    again_ptr,
    mask_ptr,
    x,
    scale,
    bias,
    there,
    start,
    offsets,
    first,
    first_column,
    end,
    row_bytes,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A tile of the gradient before the activation; `x` is the deviation from the mean."""
    gradient = tl.load(gradient_ptr + start + offsets, mask=there, other=0).to(tl.float32)
    if again_ptr is not None:
        gradient += tl.load(again_ptr + start + offsets, mask=there, other=0).to(tl.float32)
    if ACTIVATION == "relu" or ACTIVATION == "relu6":
        bits = load_bits(mask_ptr, first, first_column, end, row_bytes, ROWS, COLUMNS)
        gradient = tl.where(bits != 0, gradient, 0.0)
    elif ACTIVATION != "none":
        gradient = _through_activation(gradient, x * scale[None, :] + bias[None, :], ACTIVATION)
    return gradient


@triton.jit
def batch_norm_backward_sums(
    gradient_ptr,
    again_ptr,
    x_ptr,
    mask_ptr,
    mean_ptr,
    rstd_ptr,
    weight_ptr,
    bias_ptr,
    residual_gradient_ptr,
    other_ptr,
    other_mean_ptr,
    sums_ptr,
    products_ptr,
    other_products_ptr,
    num_rows,
    rows_a_split,
    width,
    eighths,
    ALIGNED: tl.constexpr,
    AFFINE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sums of the gradient before the activation, and of its products with x less the mean, over each split.

    That gradient is the residual's; written here, it spares the second pass the mask and a second gradient.
    """
    width = true_width(width, eighths, ALIGNED)
    row_bytes = bytes_of_row(width, eighths, ALIGNED)
    split = split_of_program(num_rows, rows_a_split, width, ROWS, COLUMNS)
    begin, end, first_column, columns, inside, offsets, place = split
    mean = tl.load(mean_ptr + columns, mask=inside, other=0)
    rstd = tl.load(rstd_ptr + columns, mask=inside, other=0)
    scale, bias = scale_and_bias(rstd, weight_ptr, bias_ptr, columns, inside, AFFINE)
    sums, products = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    if other_ptr is not None:
        other_mean = tl.load(other_mean_ptr + columns, mask=inside, other=0)
        other_products = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in range(tl.cdiv(end - begin, ROWS)):
        first = begin + tile * ROWS
        there = (first + tl.arange(0, ROWS) < end)[:, None] & inside[None, :]
        start = first.to(tl.int64) * width
        x = tl.load(x_ptr + start + offsets, mask=there, other=0).to(tl.float32) - mean[None, :]
        gradient = _before_activation(
            *(gradient_ptr, again_ptr, mask_ptr, x, scale, bias, there, start, offsets),
            *(first, first_column, end, row_bytes, ACTIVATION, ROWS, COLUMNS),
        )
        if residual_gradient_ptr is not None:
            tl.store(residual_gradient_ptr + start + offsets, gradient, mask=there)
        sums += gradient
        products += tl.where(there, gradient * x, 0.0)
        if other_ptr is not None:
            other = tl.load(other_ptr + start + offsets, mask=there, other=0).to(tl.float32)
            other_products += tl.where(there, gradient * (other - other_mean[None, :]), 0.0)
    tl.store(sums_ptr + place, tl.sum(sums, axis=0), mask=inside)
    tl.store(products_ptr + place, tl.sum(products, axis=0), mask=inside)
    if other_ptr is not None:
        tl.store(other_products_ptr + place, tl.sum(other_products, axis=0), mask=inside)


@triton.jit
def batch_norm_backward_finish(
    sums_ptr,
    products_ptr,
    rstd_ptr,
    weight_ptr,
    weight_gradient_ptr,
    bias_gradient_ptr,
    factors_ptr,
    num_rows,
    num_splits,
    width,
    AFFINE: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The gradients of weight and bias, and three factors a channel: dx = f0 * dz + f1 * (x - mean) + f2."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    sums = tl.zeros([SPLITS, COLUMNS], tl.float32)
    products = tl.zeros([SPLITS, COLUMNS], tl.float32)
    for start in range(0, num_splits, SPLITS):
        _, there, offsets = splits_from(start, num_splits, columns, inside, width, SPLITS)
        sums += tl.load(sums_ptr + offsets, mask=there, other=0)
        products += tl.load(products_ptr + offsets, mask=there, other=0)
    rstd = tl.load(rstd_ptr + columns, mask=inside, other=0)
    total = tl.sum(sums, axis=0)
    scaled = tl.sum(products, axis=0) * rstd
    factor = rstd
    if AFFINE:
        factor *= tl.load(weight_ptr + columns, mask=inside, other=0).to(tl.float32)
        tl.store(weight_gradient_ptr + columns, scaled.to(weight_gradient_ptr.dtype.element_ty), mask=inside)
        tl.store(bias_gradient_ptr + columns, total.to(bias_gradient_ptr.dtype.element_ty), mask=inside)
    tl.store(factors_ptr + columns, factor, mask=inside)
    tl.store(factors_ptr + width + columns, -factor * rstd * scaled / num_rows, mask=inside)
    tl.store(factors_ptr + 2 * width + columns, -factor * total / num_rows, mask=inside)


@triton.jit
def batch_norm_backward_apply(
    gradient_ptr,
    again_ptr,
    x_ptr,
    mask_ptr,
    mean_ptr,
    rstd_ptr,
    weight_ptr,
    bias_ptr,
    factors_ptr,
    x_gradient_ptr,
    other_ptr,
    other_mean_ptr,
    other_factors_ptr,
    other_gradient_ptr,
    num_rows,
    width,
    eighths,
    ALIGNED: tl.constexpr,
    AFFINE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The input's gradient, and of the residual that goes through a norm; one tile a program."""
    width = true_width(width, eighths, ALIGNED)
    row_bytes = bytes_of_row(width, eighths, ALIGNED)
    tile = tile_of_program(num_rows, width, ROWS, COLUMNS)
    first, first_column, columns, inside, there, start, offsets = tile
    mean = tl.load(mean_ptr + columns, mask=inside, other=0)
    rstd = tl.load(rstd_ptr + columns, mask=inside, other=0)
    x = tl.load(x_ptr + start + offsets, mask=there, other=0).to(tl.float32) - mean[None, :]
    scale, bias = scale_and_bias(rstd, weight_ptr, bias_ptr, columns, inside, AFFINE)
    gradient = _before_activation(
        *(gradient_ptr, again_ptr, mask_ptr, x, scale, bias, there, start, offsets),
        *(first, first_column, num_rows, row_bytes, ACTIVATION, ROWS, COLUMNS),
    )
    x_gradient = _from_factors(gradient, x, factors_ptr, columns, inside, width)
    tl.store(x_gradient_ptr + start + offsets, x_gradient, mask=there)
    if other_ptr is not None:
        other = tl.load(other_ptr + start + offsets, mask=there, other=0).to(tl.float32)
        other -= tl.load(other_mean_ptr + columns, mask=inside, other=0)[None, :]
        for_other = _from_factors(gradient, other, other_factors_ptr, columns, inside, width)
        tl.store(
            other_gradient_ptr + start + offsets,
            for_other.to(other_gradient_ptr.dtype.element_ty),
            mask=there,
        )


@triton.jit
def _from_factors(gradient, x, factors_ptr, columns, inside, width):
    """The gradient of an input, from its deviation from the mean and what the second kernel has left."""
    direct = tl.load(factors_ptr + columns, mask=inside, other=0)
    along = tl.load(factors_ptr + width + columns, mask=inside, other=0)
    shift = tl.load(factors_ptr + 2 * width + columns, mask=inside, other=0)
    return direct[None, :] * gradient + along[None, :] * x + shift[None, :]


def backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    mask: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str,
    has_residual: bool,
    again: torch.Tensor | None,
    other: list[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """Launch the kernels; what they return and are given, `batch_norm.reference_backward` says.

    A residual with neither activation nor norm has the output's own gradient, if that is one: nothing is
    written for it.
    """
    num_rows, width = x.shape
    tiles = Tiles.of(num_rows, width, x.device, GRADIENT_PROGRAMS)
    partial = x.new_empty((3 if other else 2, tiles.num_splits, width), dtype=torch.float32)
    kept = has_residual and not other and (activation != "none" or again is not None)
    residual_gradient = torch.empty_like(gradient) if kept else gradient.new_empty(0)
    shape = {**tiles.constants(width), "AFFINE": weight is not None}
    saved = (mask, mean, rstd, weight, bias)
    added, added_mean = other[:2] if other else (None, None)
    with on_device_of(x):
        batch_norm_backward_sums[(tiles.num_columns, tiles.num_splits)](
            *(gradient, again, x, *saved, residual_gradient if kept else None, added, added_mean),
            *(partial[0], partial[1], partial[-1]),
            *(num_rows, tiles.rows_a_split, width, width // 8),
            **shape,
            ACTIVATION=activation,
            num_warps=SUM_WARPS,
            **FUSED_MULTIPLY_ADD,
        )
        factors, *affine = _finish(partial[0], partial[1], num_rows, rstd, weight, bias)
        x_gradient, own = torch.empty_like(x), None
        more = [rstd.new_empty(0) for _ in range(2)]
        if other:
            residual_gradient = torch.empty_like(other[0])
            affine_of_other = (*other[3:], None, None)[:2]
            own, *more = _finish(partial[0], partial[2], num_rows, other[2], *affine_of_other)
        batch_norm_backward_apply[(tiles.num_tiles(num_rows),)](
            *(residual_gradient if kept else gradient, None if kept else again, x, *saved),
            *(factors, x_gradient, added, added_mean, own, residual_gradient),
            *(num_rows, width, width // 8),
            **shape,
            ACTIVATION="none" if kept else activation,
            num_warps=JOINED_WARPS if other else APPLY_WARPS,
            **FUSED_MULTIPLY_ADD,
        )
    return x_gradient, residual_gradient, affine[0], affine[1], more[0], more[1]


def _finish(
    sums: torch.Tensor,
    products: torch.Tensor,
    num_rows: int,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three factors a channel, and the gradients of weight and bias."""
    num_splits, width = sums.shape
    factors = sums.new_empty((3, width))
    affine = [torch.empty_like(p) if p is not None else rstd.new_empty(0) for p in (weight, bias)]
    batch_norm_backward_finish[(triton.cdiv(width, FINISH_COLUMNS),)](
        *(sums, products, rstd, weight, *affine, factors, num_rows, num_splits, width),
        AFFINE=weight is not None,
        SPLITS=FINISH_SPLITS,
        COLUMNS=FINISH_COLUMNS,
        **FUSED_MULTIPLY_ADD,
    )
    return factors, affine[0], affine[1]
