"""Training BatchNorm + optional residual add + activation as one operator, and its plain-PyTorch reference.

On CUDA the operators `vivace::batch_norm_moments`, `vivace::batch_norm_apply` and
`vivace::batch_norm_backward` run the Triton kernels beside this file, on a CPU the reference. They see
feature maps as matrices of pixels by channels (NHWC); `fused` takes tensors of any memory order with the
channels in dimension 1.
Source: https://arxiv.org/abs/1502.03167
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

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
_LIBRARY.define(
    "batch_norm_moments(Tensor? x, Tensor? statistics, int num_rows, int rows_a_split, "
    "Tensor(a!)? running_mean, Tensor(b!)? running_var, float momentum, float epsilon) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "batch_norm_apply(Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, Tensor? residual, "
    "Tensor[] other, str activation) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "batch_norm_backward(Tensor gradient, Tensor x, Tensor mask, Tensor mean, Tensor rstd, Tensor? weight, "
    "Tensor? bias, str activation, bool has_residual, Tensor? again, Tensor[] other) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Norm(NamedTuple):
    """One BatchNorm in training mode.

    `momentum`: weight of this batch in the running statistics, whose variance is the unbiased one.
    `statistics`: means and sums of squared deviations of splits of the pixels, (2, splits, channels), and the
    pixels of a split, where the module `product` has left them.
    """

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    running_mean: torch.Tensor | None
    running_variance: torch.Tensor | None
    momentum: float
    epsilon: float
    statistics: tuple[torch.Tensor, int] | None = None


def fused(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: Norm,
    activation: str = "none",
    other: Norm | None = None,
) -> torch.Tensor:
    """What `fused_twice` returns, once."""
    return fused_twice(x, residual, norm, activation, other)[0]


def fused_twice(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: Norm,
    activation: str = "none",
    other: Norm | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``activation(norm(x) + residual)`` in training mode; running statistics change in place.

    It comes twice, in the same memory: where two parts of a network read it, each may take one, and the two
    gradients are added in the kernels of the backward pass.

    Args:
        x: (batch, channels, ...), in any memory order; what is not channels-last is copied.
        residual: of the same shape, or None.
        activation: one of `ACTIVATIONS`; those that are not in `MASKED` go without a residual.
        other: the BatchNorm that the residual goes through, with a weight if `norm` has one.

    Returns tensors of x's shape in channels-last memory order, in the wider type of x and residual. Raises
    ValueError where there is only one value per channel, as PyTorch does.
    """
    if x.numel() // max(1, x.shape[1]) < 2:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.shape}")
    affine = (norm.weight, norm.bias, *(other[:2] if other else (None, None)))
    rest = [(*(n.statistics or (None, 0)), *n[2:6]) for n in (norm, other) if n is not None]
    result: tuple[torch.Tensor, torch.Tensor] = _Fused.apply(  # type: ignore[no-untyped-call]
        x, residual, *affine, activation, *itertools.chain(*rest)
    )
    return result


_OWN = 6  # what _Fused is given of a BatchNorm besides weight and bias


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        other_weight: torch.Tensor | None,
        other_bias: torch.Tensor | None,
        activation: str,
        *rest: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        given = as_matrix(residual) if residual is not None else None
        rows = as_matrix(x)
        mean, rstd = _moments(rows, *rest[:_OWN])
        other: list[torch.Tensor] = []
        if given is not None and len(rest) > _OWN:
            affine = [p for p in (other_weight, other_bias) if p is not None]
            other = [*_moments(given, *rest[_OWN:]), *affine]
        operands = (rows, mean, rstd, weight, bias, given, other)
        output, mask = torch.ops.vivace.batch_norm_apply(*operands, activation)
        ctx.save_for_backward(x, mask, mean, rstd, weight, bias, *([residual, *other] if other else []))
        ctx.activation = activation
        ctx.residual_dtype = residual.dtype if residual is not None else None
        ctx.num_inputs = 7 + len(rest)
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
            return tuple([None] * ctx.num_inputs)
        x, mask, mean, rstd, weight, bias, *other = ctx.saved_tensors
        has_residual = ctx.residual_dtype is not None
        joined = [as_matrix(other[0]), *other[1:]] if other else []
        for_x, for_residual, *affine = torch.ops.vivace.batch_norm_backward(
            *(as_matrix(gradient), as_matrix(x), mask, mean, rstd, weight, bias, ctx.activation),
            *(has_residual, as_matrix(again) if again is not None else None, joined),
        )
        residual = None
        if has_residual:
            own = other or writes_for_residual(ctx.activation, has_residual, again, joined)
            residual = (as_image(for_residual, x) if own else gradient).to(ctx.residual_dtype)
        there = (weight is not None,) * 2 + (len(other) > 3,) * 2
        gradients = [g if one else None for g, one in zip(affine, there, strict=True)]
        return as_image(for_x, x), residual, *gradients, *(None,) * (ctx.num_inputs - 6)


def _moments(
    x: torch.Tensor, statistics: torch.Tensor | None, rows_a_split: int, *options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and reciprocal deviation of the rows of a matrix; running statistics move."""
    spared = (x if statistics is None else None, statistics, len(x), rows_a_split)
    mean, rstd = torch.ops.vivace.batch_norm_moments(*spared, *options)
    for changed in options[:2]:
        if changed is not None and not torch.compiler.is_compiling():
            torch.autograd.graph.increment_version(changed)  # an operator of a library does not
    return mean, rstd


def apply_activation(z: torch.Tensor, activation: str) -> torch.Tensor:
    """One of `ACTIVATIONS`, by torch's own function."""
    result: torch.Tensor = _FUNCTIONS[activation](z)
    return result


def writes_for_residual(
    activation: str, has_residual: bool, again: torch.Tensor | None, other: list[torch.Tensor]
) -> bool:
    """Does the backward pass write the gradient before the activation, as the residual's?"""
    return has_residual and not other and (activation != "none" or again is not None)


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """(batch, channels, ...) as contiguous (pixels, channels): a view where `x` is channels-last."""
    return x.movedim(1, -1).reshape(-1, x.shape[1]).contiguous()


def as_image(matrix: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """(pixels, channels) as a channels-last view, with the batch and the pixels of `like`."""
    return matrix.view(like.shape[0], *like.shape[2:], matrix.shape[1]).movedim(-1, 1)


def reference_moments(
    x: torch.Tensor | None,
    statistics: torch.Tensor | None,
    num_rows: int,
    rows_a_split: int,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and reciprocal deviation, of x or of its splits' statistics, in fp32 or for float64 in that."""
    if statistics is None:
        assert x is not None
        variance, mean = torch.var_mean(wide(x), 0, correction=0)
    else:
        means, squares = statistics
        begins = torch.arange(0, num_rows, rows_a_split, device=means.device)
        counts = (num_rows - begins).clamp(max=rows_a_split)[:, None]
        mean = (means * counts).sum(0) / num_rows
        variance = (squares + counts * (means - mean).square()).sum(0) / num_rows
    if running_mean is not None and running_var is not None:
        unbiased = variance * (num_rows / (num_rows - 1))
        running_mean.copy_(momentum * mean + (1 - momentum) * running_mean)
        running_var.copy_(momentum * unbiased + (1 - momentum) * running_var)
    return mean, torch.rsqrt(variance + epsilon)


def reference_apply(
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
    z = _affine((wide(x) - mean) * rstd, weight, bias)
    if residual is not None:
        added, affine = wide(residual), (*other[2:], None, None)[:2]
        z = z + (_affine((added - other[0]) * other[1], *affine) if other else added)
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    mask = x.new_empty((0, packed_width(x)), dtype=torch.uint8)
    if activation in MASKED:
        kept = ~(z <= 0) if activation == "relu" else ~(z <= 0) & (z < 6)
        mask = pack(kept)
    return apply_activation(z, activation).to(dtype), mask


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
    again: torch.Tensor | None,
    other: list[torch.Tensor],
) -> Gradients:
    """The gradients of x, residual, weight, bias and of the other weight and bias; empty where there is none.

    `other` begins with the residual, of which the rest are mean, reciprocal deviation, weight and bias.
    """
    before = wide(gradient) if again is None else wide(gradient) + wide(again)
    if activation in MASKED:
        before = before * unpack(mask, x.shape[1])
    elif activation != "none":
        before = _through(activation, before, _affine((wide(x) - mean) * rstd, weight, bias))
    for_x, *affine = _through_norm(before, x, mean, rstd, weight, bias)
    kept = writes_for_residual(activation, has_residual, again, other)
    for_residual = before.to(gradient.dtype) if kept else gradient.new_empty(0)
    more = [rstd.new_empty(0) for _ in range(2)]
    if other:
        for_residual, *more = _through_norm(before, *other, *(None,) * (5 - len(other)))
    return for_x, for_residual, affine[0], affine[1], more[0], more[1]


def _through_norm(
    before: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of x, weight and bias from that of a BatchNorm's result."""
    normal = (wide(x) - mean) * rstd
    sums, products = before.mean(0), (before * normal).mean(0)
    factor = rstd if weight is None else rstd * wide(weight)
    for_x = (factor * (before - sums - normal * products)).to(x.dtype)
    if weight is None or bias is None:
        return for_x, rstd.new_empty(0), rstd.new_empty(0)
    return for_x, (products * len(x)).to(weight.dtype), (sums * len(x)).to(bias.dtype)


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


def _moments_on_cuda(*arguments: Any) -> Any:
    from vivace.techniques.fused_batchnorm.kernels import batch_norm_forward

    return batch_norm_forward.moments(*arguments)


def _apply_on_cuda(*arguments: Any) -> Any:
    from vivace.techniques.fused_batchnorm.kernels import batch_norm_forward

    return batch_norm_forward.apply(*arguments)


def _backward_on_cuda(*arguments: Any) -> Any:
    from vivace.techniques.fused_batchnorm.kernels import batch_norm_backward

    return batch_norm_backward.backward(*arguments)


def _moments_shapes(x: torch.Tensor | None, statistics: torch.Tensor | None, *_: Any) -> Any:
    if statistics is not None:
        return tuple(statistics.new_empty(statistics.shape[2]) for _ in range(2))
    assert x is not None
    return tuple(x.new_empty(x.shape[1], dtype=wide(x).dtype) for _ in range(2))


def _apply_shapes(x: torch.Tensor, *rest: Any) -> Any:
    residual, activation = rest[4], rest[-1]
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    mask = x.new_empty((len(x) if activation in MASKED else 0, packed_width(x)), dtype=torch.uint8)
    return torch.empty_like(x, dtype=dtype), mask


def _backward_shapes(*arguments: Any) -> Any:
    gradient, x, _, _, rstd, weight, bias, *how = arguments
    other = how[-1]
    for_residual = torch.empty_like(gradient) if writes_for_residual(*how) else gradient.new_empty(0)
    affine = (weight, bias, *(*other[3:], None, None)[:2])
    gradients = (torch.empty_like(p) if p is not None else rstd.new_empty(0) for p in affine)
    return torch.empty_like(x), torch.empty_like(other[0]) if other else for_residual, *gradients


for _name, _reference, _cuda, _shapes in (
    ("batch_norm_moments", reference_moments, _moments_on_cuda, _moments_shapes),
    ("batch_norm_apply", reference_apply, _apply_on_cuda, _apply_shapes),
    ("batch_norm_backward", reference_backward, _backward_on_cuda, _backward_shapes),
):
    _LIBRARY.impl(_name, _reference, "CPU")
    _LIBRARY.impl(_name, _cuda, "CUDA")
    torch.library.register_fake(f"vivace::{_name}", _shapes, lib=_LIBRARY)
