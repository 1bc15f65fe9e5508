"""A depthwise convolution whose slow gradients come from `kernels.c`, as operators that PyTorch's tools know.

`vivace::depthwise_weights` and `vivace::depthwise_input` see feature maps in NHWC memory order and copy what
lies otherwise. Which gradient is theirs follows from shapes and type alone, so that runs repeat bit for bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from vivace.mechanisms.c_code import compiled
from vivace.tensors.modules import both, in_nhwc, is_slow_depthwise, lies_in_nhwc, padding_of
from vivace.torch_internals.tensors import is_transformed

SOURCE = Path(__file__).with_name("kernels.c")
NUM_TASKS = 64  # into which a gradient of weights is divided, on however many threads: the sums are the same
CHANNELS_A_TASK = 16


class _Shape(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("images", "channels", "height", "width")),
        *((name, ctypes.c_int64) for name in ("out_height", "out_width")),
        *((name, ctypes.c_int64 * 2) for name in ("window", "stride", "padding", "dilation")),
        *((name, ctypes.c_int64) for name in ("half", "threads")),
    ]


def library() -> ctypes.CDLL:
    """The kernels. Raises OSError where they cannot be compiled."""
    return compiled(SOURCE)


def slow_weights(window: Sequence[int], dilation: Sequence[int]) -> bool:
    """Has the library no fast kernel for the gradient of the weights?"""
    return max(window) > 3 or max(dilation) > 1


def slow_input(dtype: torch.dtype, stride: Sequence[int], dilation: Sequence[int]) -> bool:
    """Has the library no fast kernel for the gradient of the input?"""
    return max(dilation) > 1 or (dtype == torch.bfloat16 and max(stride) > 1)


def may_gain(module: nn.Conv2d) -> bool:
    """Is it a depthwise convolution of PyTorch's own class, of which a gradient may be slow?"""
    plain = type(module) is nn.Conv2d and module.padding_mode == "zeros" and padding_of(module) is not None
    return plain and is_slow_depthwise(module)


def convolution(module: nn.Conv2d, x: Tensor) -> Tensor | None:
    """What the module gives for a batch of images, cast as autocast casts; None where nothing would gain."""
    weight, bias, padding = module.weight, module.bias, padding_of(module)
    if x.device.type != "cpu" or torch.float64 in (x.dtype, weight.dtype):  # autocast leaves float64
        return None
    real = x.is_floating_point() and weight.is_floating_point()
    if not real or padding is None or module.padding_mode != "zeros" or is_transformed():
        return None
    if weight.shape[:2] != (module.groups, 1):  # another one lies there meanwhile
        return None
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        x, weight = x.to(dtype), weight.to(dtype)
        bias = bias if bias is None else bias.to(dtype)
    same = x.dtype == weight.dtype and x.dtype in (torch.float32, torch.bfloat16)
    stride, dilation = both(module.stride), both(module.dilation)
    slow = slow_input(x.dtype, stride, dilation)
    if not same or not (slow or slow_weights(module.kernel_size, dilation)):
        return None
    return cast("Tensor", _Depthwise.apply(x, weight, bias, stride, padding, dilation))  # type: ignore[no-untyped-call]


class _Depthwise(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *where: Sequence[int]
    ) -> Tensor:
        context.save_for_backward(x, weight)
        context.where = stride, padding, dilation = where
        return torch.conv2d(x, weight, bias, stride, padding, dilation, len(weight))

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = context.saved_tensors
        stride, padding, dilation = where = context.where
        if torch.is_grad_enabled():  # these gradients are to be differentiated in turn
            asked = (False, (0, 0), len(weight), context.needs_input_grad[:3])
            return (
                *torch.ops.aten.convolution_backward(gradient, x, weight, [len(weight)], *where, *asked),
                None,
                None,
                None,
            )
        own = (slow_input(x.dtype, stride, dilation), slow_weights(weight.shape[2:], dilation))
        for_input, for_weights, for_bias = context.needs_input_grad[:3]
        # The library computes the gradient of the weights along with the bias's.
        of_bias = gradient.sum((0, 2, 3), dtype=torch.float32).to(x.dtype) if for_bias else None
        left = [for_input and not own[0], for_weights and not own[1], False]
        of_input = of_weights = None
        if any(left):
            further = (None, stride, padding, dilation, False, (0, 0), len(weight), left)
            of_input, of_weights, _ = torch.ops.aten.convolution_backward(gradient, x, weight, *further)
        if for_input and own[0]:
            of_input = torch.ops.vivace.depthwise_input(gradient, x, weight, *where)
        if for_weights and own[1]:
            of_weights = torch.ops.vivace.depthwise_weights(gradient, x, weight, *where)
        return of_input, of_weights, of_bias, None, None, None


def _depthwise_weights(gradient: Tensor, x: Tensor, weight: Tensor, *where: Sequence[int]) -> Tensor:
    channels, _, high, wide = weight.shape
    groups = max(1, min(len(x), NUM_TASKS * CHANNELS_A_TASK // channels))
    sums = x.new_zeros((groups, high * wide, channels), dtype=torch.float32)
    x, gradient = in_nhwc(x), in_nhwc(gradient)
    shape = _shape(gradient, x, weight, where)
    _run(library().depthwise_weights, x, gradient, sums, ctypes.c_int64(groups), shape)
    return sums.sum(0).t().to(weight.dtype).contiguous().view(weight.shape)


def _depthwise_input(gradient: Tensor, x: Tensor, weight: Tensor, *where: Sequence[int]) -> Tensor:
    gradient, found = in_nhwc(gradient), torch.empty_like(x, memory_format=torch.channels_last)
    taps = weight.float().flatten(1).t().contiguous()
    _run(library().depthwise_input, taps, gradient, found, _shape(gradient, x, weight, where))
    if lies_in_nhwc(x):
        return found
    return torch.empty_like(x, memory_format=torch.contiguous_format).copy_(found)


def _shape(gradient: Tensor, x: Tensor, weight: Tensor, where: Sequence[Sequence[int]]) -> _Shape:
    pairs = [(ctypes.c_int64 * 2)(*pair) for pair in (weight.shape[2:], *where)]
    return _Shape(
        *x.shape, *gradient.shape[2:], *pairs, int(x.dtype == torch.bfloat16), torch.get_num_threads()
    )


def _run(kernel: Callable[..., int], *arguments: Tensor | ctypes.c_int64 | _Shape) -> None:
    plain = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else a for a in arguments]
    failed = kernel(*plain[:-1], ctypes.byref(cast("_Shape", plain[-1])))
    if failed:
        raise MemoryError("there is no memory left for the rows that a gradient is summed from")


def _shapes_of_weights(gradient: Tensor, x: Tensor, weight: Tensor, *where: Sequence[int]) -> Tensor:
    return weight.new_empty(weight.shape)


def _shapes_of_input(gradient: Tensor, x: Tensor, weight: Tensor, *where: Sequence[int]) -> Tensor:
    order = torch.channels_last if lies_in_nhwc(x) else torch.contiguous_format
    return torch.empty_like(x, memory_format=order)


_LIBRARY = torch.library.Library("vivace", "FRAGMENT")  # type: ignore[no-untyped-call]
for _name, _function, _shapes in (
    ("depthwise_weights", _depthwise_weights, _shapes_of_weights),
    ("depthwise_input", _depthwise_input, _shapes_of_input),
):
    _LIBRARY.define(  # type: ignore[no-untyped-call]
        f"{_name}(Tensor gradient, Tensor x, Tensor weight, "
        "int[] stride, int[] padding, int[] dilation) -> Tensor"
    )
    _LIBRARY.impl(_name, _function, "CPU")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"vivace::{_name}", _shapes, lib=_LIBRARY)


@register_flop_formula([torch.ops.vivace.depthwise_weights, torch.ops.vivace.depthwise_input])  # type: ignore[untyped-decorator]
def _operations(
    gradient: torch.Size, x: torch.Size, weight: torch.Size, *where: Sequence[int], out_shape: torch.Size
) -> int:
    return 2 * gradient.numel() * weight[2:].numel()
