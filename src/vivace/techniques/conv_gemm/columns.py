"""A convolution as a matrix product of columns: every window of the input is a row of the matrix."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

Pair = tuple[int, int]


def output_size(size: Pair, window: tuple[int, ...], stride: tuple[int, ...], padding: Pair) -> Pair:
    """Rows and columns of a convolution's output."""
    high, wide = ((size[n] + 2 * padding[n] - window[n]) // stride[n] + 1 for n in (0, 1))
    return high, wide


def columns(image: Tensor, window: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Of an image (N, height, width, C) the matrix (N * windows, window rows * window columns * C)."""
    (rows, across), (down, right) = padding, stride
    image = pad(image, (0, 0, across, across, rows, rows))
    windows = image.unfold(1, window[0], down).unfold(2, window[1], right)  # N, high, wide, C, rows, columns
    return windows.permute(0, 1, 2, 4, 5, 3).reshape(-1, window[0] * window[1] * image.shape[3])


def convolution_by_columns(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, ...], padding: Pair
) -> Tensor:
    """What ``conv2d`` of one group without dilation gives, forward and backward, by matrix products.

    The columns are laid out anew in the backward pass, so no more memory is kept than by the convolution.
    Under autocast the inputs are rounded as it rounds a convolution's.

    Args:
        x: (N, C, height, width), best in channels-last order.
        weight: (outputs, C, window rows, window columns).
        bias: (outputs,), or None.
        stride: rows and columns from one window to the next.
        padding: rows and columns of zeros on each side.
    """
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and torch.float64 not in (x.dtype, weight.dtype):
        dtype = torch.get_autocast_dtype(kind)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = bias if bias is None else bias.to(dtype)
    product: Tensor = _ByColumns.apply(x, weight, cast("Pair", tuple(stride)), padding)  # type: ignore[no-untyped-call]
    high, wide = output_size((x.shape[2], x.shape[3]), tuple(weight.shape[2:]), stride, padding)
    # Not in the function: of a view made there nothing may be changed in place.
    found = product.view(x.shape[0], high, wide, weight.shape[0]).movedim(-1, 1)
    return found if bias is None else found + bias[:, None, None]


class _ByColumns(torch.autograd.Function):
    """The matrix (N * windows, outputs)."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
        context.save_for_backward(x, weight)
        context.stride, context.padding = stride, padding
        outputs, _, *window = weight.shape
        rows = columns(x.movedim(1, -1), (window[0], window[1]), stride, padding)
        return rows @ weight.permute(0, 2, 3, 1).reshape(outputs, -1).t()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:  # type: ignore[override]
        x, weight = context.saved_tensors
        outputs, inputs, *sizes = weight.shape
        window = (sizes[0], sizes[1])
        of_input = of_weight = None
        if context.needs_input_grad[0]:
            high, wide = output_size((x.shape[2], x.shape[3]), window, context.stride, context.padding)
            image = gradient.reshape(x.shape[0], high, wide, outputs).movedim(-1, 1)
            of_input = _of_input(image, x, weight, context.stride, context.padding)
        if context.needs_input_grad[1]:
            rows = columns(x.movedim(1, -1), window, context.stride, context.padding)
            product = gradient.t() @ rows
            of_weight = product.view(outputs, *window, inputs).movedim(-1, 1)
        return of_input, of_weight, None, None


def _of_input(gradient: Tensor, x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
    """At stride one a convolution too, of the gradient by the turned weights; else the library's."""
    _, inputs, high, wide = weight.shape
    around = (high - 1 - padding[0], wide - 1 - padding[1])
    if stride != (1, 1) or min(around) < 0:
        wanted = [True, False, False]
        found = torch.ops.aten.convolution_backward(
            gradient, x, weight, None, stride, padding, (1, 1), False, (0, 0), 1, wanted
        )
        return cast("Tensor", found[0])
    rows = columns(gradient.movedim(1, -1), (high, wide), (1, 1), around)
    turned = weight.flip(2, 3).permute(2, 3, 0, 1).reshape(-1, inputs)
    return (rows @ turned).view(x.shape[0], x.shape[2], x.shape[3], inputs).movedim(-1, 1)
