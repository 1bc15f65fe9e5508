"""Training BatchNorm + optional residual add + activation as one operator, and its plain-PyTorch reference.

On CUDA the operators `vivace::batch_norm` and `vivace::batch_norm_backward` run the Triton kernels beside
this file, on a CPU the reference. They see feature maps as matrices of pixels by channels (NHWC); `fused`
takes tensors of any memory order with the channels in dimension 1.
Source: https://arxiv.org/abs/1502.03167
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

ACTIVATIONS = ("none", "relu", "relu6", "silu", "hardswish")
MASKED = ("relu", "relu6")  # remembered by one bit an element; the others are computed again from the input
_FUNCTIONS: dict[str, Any] = {
    "none": lambda z: z,
    "relu": functional.relu,
    "relu6": functional.relu6,
    "silu": functional.silu,
    "hardswish": functional.hardswish,
}
_LIBRARY = torch.library.Library("vivace", "FRAGMENT")
_REST = (
    "Tensor? residual, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
    "float momentum, float epsilon, str activation) -> (Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(f"batch_norm(Tensor x, {_REST}")
_LIBRARY.define(f"batch_norm_from(Tensor x, Tensor statistics, int rows_a_split, {_REST}")
_LIBRARY.define(
    "batch_norm_backward(Tensor gradient, Tensor x, Tensor mask, Tensor mean, Tensor rstd, Tensor? weight, "
    "Tensor? bias, str activation, bool has_residual, Tensor? again) -> (Tensor, Tensor, Tensor, Tensor)"
)


def fused(*arguments: Any) -> torch.Tensor:
    """What `fused_twice` returns, once."""
    return fused_twice(*arguments)[0]


def fused_twice(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_variance: torch.Tensor | None,
    momentum: float,
    epsilon: float,
    activation: str = "none",
    statistics: tuple[torch.Tensor, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``activation(batch_norm(x) + residual)`` in training mode; running statistics change in place.

    It comes twice, in the same memory: where two parts of a network read it, each may take one, and the two
    gradients are added in the kernels of the backward pass.

    Args:
        x: (batch, channels, ...), in any memory order; what is not channels-last is copied.
        residual: of the same shape, or None.
        momentum: weight of this batch in the running statistics, whose variance is the unbiased one.
        activation: one of `ACTIVATIONS`; those that are not in `MASKED` go without a residual.
        statistics: means and sums of squared deviations of splits of x's pixels, (2, splits, channels), and
            the pixels of a split, where the module `product` has left them.

    Returns tensors of x's shape in channels-last memory order, in the wider type of x and residual. Raises
    ValueError where there is only one value per channel, as PyTorch does.
    """
    if x.numel() // max(1, x.shape[1]) < 2:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.shape}")
    options = (running_mean, running_variance, momentum, epsilon, activation)
    result: tuple[torch.Tensor, torch.Tensor] = _Fused.apply(  # type: ignore[no-untyped-call]
        x, residual, weight, bias, *(statistics or (None, 0)), *options
    )
    return result


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        statistics: torch.Tensor | None,
        rows_a_split: int,
        *options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        given = (as_matrix(residual) if residual is not None else None, weight, bias, *options)
        if statistics is None:
            output, mask, mean, rstd = torch.ops.vivace.batch_norm(as_matrix(x), *given)
        else:
            found = torch.ops.vivace.batch_norm_from(as_matrix(x), statistics, rows_a_split, *given)
            output, mask, mean, rstd = found
        for changed in options[:2]:
            if changed is not None and not torch.compiler.is_compiling():
                torch.autograd.graph.increment_version(changed)  # an operator of a library does not
        ctx.save_for_backward(x, mask, mean, rstd, weight, bias)
        ctx.activation = options[-1]
        ctx.residual_dtype = residual.dtype if residual is not None else None
        ctx.set_materialize_grads(False)
        image = as_image(output, x)
        return image.detach(), image.detach()  # a view of another tensor could not be changed in place

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(
        ctx: Any, gradient: torch.Tensor | None, again: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if gradient is None:
            gradient, again = again, None
        if gradient is None:
            return (None,) * 11
        x, mask, mean, rstd, weight, bias = ctx.saved_tensors
        has_residual = ctx.residual_dtype is not None
        for_x, for_residual, for_weight, for_bias = torch.ops.vivace.batch_norm_backward(
            *(as_matrix(gradient), as_matrix(x), mask, mean, rstd, weight, bias),
            *(ctx.activation, has_residual, as_matrix(again) if again is not None else None),
        )
        residual = None
        if has_residual:
            own = writes_for_residual(ctx.activation, has_residual, again)
            residual = (as_image(for_residual, x) if own else gradient).to(ctx.residual_dtype)
        affine = (for_weight, for_bias) if weight is not None else (None, None)
        return as_image(for_x, x), residual, *affine, *(None,) * 7


def apply_activation(z: torch.Tensor, activation: str) -> torch.Tensor:
    """One of `ACTIVATIONS`, by torch's own function."""
    result: torch.Tensor = _FUNCTIONS[activation](z)
    return result


def writes_for_residual(activation: str, has_residual: bool, again: torch.Tensor | None) -> bool:
    """Does the backward pass write a gradient for the residual that is not the output's own?"""
    return has_residual and (activation != "none" or again is not None)


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """(batch, channels, ...) as contiguous (pixels, channels): a view where `x` is channels-last."""
    return x.movedim(1, -1).reshape(-1, x.shape[1]).contiguous()


def as_image(matrix: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """(pixels, channels) as a channels-last view, with the batch and the pixels of `like`."""
    return matrix.view(like.shape[0], *like.shape[2:], matrix.shape[1]).movedim(-1, 1)


def reference(x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the kernels of the forward pass compute, in fp32 or, for float64, in that."""
    return _applied(x, *torch.var_mean(wide(x), 0, correction=0), *rest)


def reference_from(
    x: torch.Tensor, statistics: torch.Tensor, rows_a_split: int, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same where the first pass over x is spared."""
    means, squares = statistics
    begins = torch.arange(0, len(x), rows_a_split, device=x.device)
    counts = (len(x) - begins).clamp(max=rows_a_split)[:, None]
    mean = (means * counts).sum(0) / len(x)
    variance = (squares + counts * (means - mean).square()).sum(0) / len(x)
    return _applied(x, variance, mean, *rest)


def _applied(
    x: torch.Tensor,
    variance: torch.Tensor,
    mean: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float,
    epsilon: float,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rstd = torch.rsqrt(variance + epsilon)
    if running_mean is not None and running_var is not None:
        unbiased = variance * (len(x) / (len(x) - 1))
        running_mean.copy_(momentum * mean + (1 - momentum) * running_mean)
        running_var.copy_(momentum * unbiased + (1 - momentum) * running_var)
    z = _affine((wide(x) - mean) * rstd, weight, bias)
    if residual is not None:
        z = z + wide(residual)
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    mask = x.new_empty((0, packed_width(x)), dtype=torch.uint8)
    if activation in MASKED:
        kept = ~(z <= 0) if activation == "relu" else ~(z <= 0) & (z < 6)
        mask = pack(kept)
    return apply_activation(z, activation).to(dtype), mask, mean, rstd


def reference_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    mask: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str,
    has_residual: bool,
    again: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the kernels of the backward pass compute, in fp32 or, for float64, in that."""
    normal, before = (wide(x) - mean) * rstd, wide(gradient)
    if again is not None:
        before = before + wide(again)
    if activation in MASKED:
        before = before * unpack(mask, x.shape[1])
    elif activation != "none":
        before = _through(activation, before, _affine(normal, weight, bias))
    sums, products = before.mean(0), (before * normal).mean(0)
    factor = rstd if weight is None else rstd * wide(weight)
    for_x = (factor * (before - sums - normal * products)).to(x.dtype)
    empty = x.new_empty(0)
    kept = writes_for_residual(activation, has_residual, again)
    for_residual = before.to(gradient.dtype) if kept else gradient.new_empty(0)
    if weight is None or bias is None:
        return for_x, for_residual, empty, torch.empty_like(empty)
    affine = ((products * len(x)).to(weight.dtype), (sums * len(x)).to(bias.dtype))
    return for_x, for_residual, *affine


def pack(bits: torch.Tensor) -> torch.Tensor:
    """Eight neighbouring columns of booleans in one byte, the lowest first: (rows, ceil(columns / 8))."""
    padded = functional.pad(bits.to(torch.uint8), (0, -bits.shape[1] % 8))
    places = 2 ** torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (padded.view(len(bits), -1, 8) * places).sum(-1, dtype=torch.uint8)


def unpack(packed: torch.Tensor, width: int) -> torch.Tensor:
    """The first `width` columns of what `pack` made, as booleans."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> places) & 1).flatten(1)[:, :width].bool()


def packed_width(x: torch.Tensor) -> int:
    """Bytes of one row of the mask."""
    return math.ceil(x.shape[1] / 8)


def wide(x: torch.Tensor) -> torch.Tensor:
    """In the type that sums are taken in."""
    return x if x.dtype == torch.float64 else x.float()


def _affine(normal: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    return normal if weight is None or bias is None else normal * wide(weight) + wide(bias)


def _through(activation: str, gradient: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    if activation == "silu":
        sigmoid = torch.sigmoid(z)
        return gradient * sigmoid * (1 + z * (1 - sigmoid))
    return gradient * torch.where(z < -3, 0.0, torch.where(z <= 3, z / 3 + 0.5, 1.0))


def _on_cuda(*arguments: Any) -> Any:
    from vivace.techniques.untried.fused_batchnorm.kernels import batch_norm_forward

    return batch_norm_forward.forward(*arguments)


def _from_on_cuda(x: torch.Tensor, *arguments: Any) -> Any:
    from vivace.techniques.untried.fused_batchnorm.kernels import batch_norm_forward

    return batch_norm_forward.forward_from(x, *arguments)


def _backward_on_cuda(*arguments: Any) -> Any:
    from vivace.techniques.untried.fused_batchnorm.kernels import batch_norm_backward

    return batch_norm_backward.backward(*arguments)


def _shapes(x: torch.Tensor, residual: torch.Tensor | None, *rest: Any) -> Any:
    activation = rest[-1]
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    mask = x.new_empty((len(x) if activation in MASKED else 0, packed_width(x)), dtype=torch.uint8)
    mean, rstd = (x.new_empty(x.shape[1], dtype=wide(x).dtype) for _ in range(2))
    return torch.empty_like(x, dtype=dtype), mask, mean, rstd


def _backward_shapes(*arguments: Any) -> Any:
    gradient, x, _, _, _, weight, bias, *how = arguments
    for_residual = torch.empty_like(gradient) if writes_for_residual(*how) else gradient.new_empty(0)
    affine = (torch.empty_like(p) if p is not None else x.new_empty(0) for p in (weight, bias))
    return torch.empty_like(x), for_residual, *affine


_LIBRARY.impl("batch_norm", reference, "CPU")
_LIBRARY.impl("batch_norm_from", reference_from, "CPU")
_LIBRARY.impl("batch_norm_backward", reference_backward, "CPU")
_LIBRARY.impl("batch_norm", _on_cuda, "CUDA")
_LIBRARY.impl("batch_norm_from", _from_on_cuda, "CUDA")
_LIBRARY.impl("batch_norm_backward", _backward_on_cuda, "CUDA")
torch.library.register_fake("vivace::batch_norm", _shapes, lib=_LIBRARY)
torch.library.register_fake(
    "vivace::batch_norm_from", lambda x, _, __, *rest: _shapes(x, *rest), lib=_LIBRARY
)
torch.library.register_fake("vivace::batch_norm_backward", _backward_shapes, lib=_LIBRARY)
