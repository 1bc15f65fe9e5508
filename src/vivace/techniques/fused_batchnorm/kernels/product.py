"""A 1x1 convolution as a matrix product that leaves the statistics of its result for the BatchNorm behind it.

On CUDA the operator `vivace::statistics_mm` runs the Triton kernel of `product_forward`, on a
CPU the reference. It spares the first of BatchNorm's two reads of the feature map.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from vivace.techniques.fused_batchnorm.kernels.batch_norm import as_image, as_matrix, wide
from vivace.techniques.fused_batchnorm.kernels.splits import split_rows

_LIBRARY = torch.library.Library("vivace", "FRAGMENT")
_LIBRARY.define("statistics_mm(Tensor x, Tensor weight) -> (Tensor, Tensor)")


def product(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``conv2d(x, weight)`` for a 1x1 window, and the statistics that `batch_norm.fused` begins with.

    Args:
        x: (batch, inner, ...), in any memory order; what is not channels-last is copied.
        weight: (width, inner, 1, 1), of the type of `x`; both multiples of 8, so that rows are aligned.

    Returns the result in channels-last order, and in fp32 (2, splits, width): of each channel over each split
    of `split_rows` pixels the mean, and the sum of squared deviations from it.
    """
    result: tuple[torch.Tensor, torch.Tensor] = _Product.apply(x, weight)  # type: ignore[no-untyped-call]
    return result


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, statistics = torch.ops.vivace.statistics_mm(as_matrix(x), weight.flatten(1).contiguous())
        ctx.save_for_backward(x, weight)
        ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)
        return as_image(y, x), statistics

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, gradient: torch.Tensor | None, _: Any) -> tuple[torch.Tensor | None, ...]:
        if gradient is None:
            return None, None
        x, weight = ctx.saved_tensors
        rows = as_matrix(gradient)
        for_x = as_image(rows @ weight.flatten(1), x) if ctx.needs_input_grad[0] else None
        for_weight = (rows.T @ as_matrix(x)).view_as(weight) if ctx.needs_input_grad[1] else None
        return for_x, for_weight


def reference(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel computes: sums in fp32 or, for float64, in that, of the result as it is rounded."""
    y = x @ weight.T
    splits = wide(y).split(split_rows(*y.shape))
    means = torch.stack([split.mean(0) for split in splits])
    squares = torch.stack([(split - split.mean(0)).square().sum(0) for split in splits])
    return y, torch.stack([means, squares])


def _on_cuda(x: torch.Tensor, weight: torch.Tensor) -> Any:
    from vivace.techniques.fused_batchnorm.kernels import product_forward

    return product_forward.forward(x, weight)


def _shapes(x: torch.Tensor, weight: torch.Tensor) -> Any:
    num_rows, width = len(x), len(weight)
    splits = -(-num_rows // split_rows(num_rows, width))
    return x.new_empty(num_rows, width), x.new_empty(2, splits, width, dtype=wide(x).dtype)


_LIBRARY.impl("statistics_mm", reference, "CPU")
_LIBRARY.impl("statistics_mm", _on_cuda, "CUDA")
torch.library.register_fake("vivace::statistics_mm", _shapes, lib=_LIBRARY)


@register_flop_formula(torch.ops.vivace.statistics_mm)  # type: ignore[untyped-decorator]
def _operations(x_shape: Any, weight_shape: Any, *_: Any, **__: Any) -> int:
    return int(2 * x_shape[0] * x_shape[1] * weight_shape[0])
