"""BatchNorm of feature maps in NHWC order on a CPU, with sums that round no further than in the other order.

PyTorch's kernels for this order add up a channel's numbers one by one in float32: over 400,000 pixels the
variance is off by 1e-4 of itself, in NCHW order by 1e-7.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from vivace.mechanisms.c_code import compiled, threads_for
from vivace.tensors.modules import in_nhwc, lies_in_nhwc
from vivace.torch_internals.tensors import is_transformed

SOURCE = Path(__file__).with_suffix(".c")
FEWEST_PIXELS = 8192  # of a channel: fewer are summed near enough, and sooner, by PyTorch


class _Shape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("rows", "channels", "half", "threads")]


class _Exchange:
    """Puts `batch_norm` in the place of torch's, for as long as somebody wants that."""

    def __init__(self) -> None:
        self.own: Callable[..., Any] = torch.batch_norm
        self.begun, self.lock = 0, threading.Lock()

    def begin(self) -> Callable[[], None]:
        """Returns what ends it. Raises OSError where the C code cannot be compiled."""
        compiled(SOURCE)
        with self.lock:
            if not self.begun:
                self.own, torch.batch_norm = torch.batch_norm, batch_norm
            self.begun += 1
        return self._end

    def _end(self) -> None:
        with self.lock:
            self.begun -= 1
            if not self.begun and torch.batch_norm is batch_norm:
                torch.batch_norm = self.own


def batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """``torch.batch_norm``, by the C code for what that is made for."""
    moved = (running_mean, running_var)
    wanted = training and not torch.compiler.is_compiling()  # what is compiled has kernels of its own
    if not (wanted and _suits(input, (weight, bias, *moved))):
        found = _exchange.own(input, weight, bias, *moved, training, momentum, eps, cudnn_enabled)
        return cast("Tensor", found)
    result, mean, variance = _Norm.apply(input, weight, bias, eps)  # type: ignore[no-untyped-call]
    if running_mean is not None and running_var is not None:
        pixels = input.numel() // input.shape[1]
        with torch.no_grad():
            running_mean.mul_(1 - momentum).add_(mean, alpha=momentum)
            running_var.mul_(1 - momentum).add_(variance, alpha=momentum * pixels / (pixels - 1))
    return cast("Tensor", result)


def _suits(x: Tensor, by_channel: tuple[Tensor | None, ...]) -> bool:
    """Are these maps that the C code is made for?"""
    if x.dim() != 4 or x.device.type != "cpu" or x.dtype not in (torch.float32, torch.bfloat16):
        return False
    if x.numel() < FEWEST_PIXELS * x.shape[1] or x.is_contiguous() or not lies_in_nhwc(x):
        return False
    given = [one for one in by_channel if one is not None]
    plain = all(one.dtype == torch.float32 and one.is_contiguous() for one in given)
    known = {type(one) for one in (x, *given)} <= {Tensor, nn.Parameter, nn.Buffer}
    both = len(given) in (0, 4) or (by_channel[0] is None) == (by_channel[1] is None)
    return plain and known and both and not is_transformed()


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        result, mean, variance, rstd = torch.ops.vivace.batch_norm_nhwc(x, weight, bias, epsilon)
        context.save_for_backward(x, weight, mean, rstd)
        context.epsilon = epsilon
        context.mark_non_differentiable(mean, variance)
        context.set_materialize_grads(False)
        return result, mean, variance

    @staticmethod
    def backward(context: Any, gradient: Tensor | None, *_: Tensor) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return None, None, None, None
        x, weight, mean, rstd = context.saved_tensors
        asked = [*context.needs_input_grad[:3]]
        if torch.is_grad_enabled():  # these gradients are to be differentiated in turn
            where = (None, None, mean, rstd, True, context.epsilon, asked)
            return (*torch.ops.aten.native_batch_norm_backward(gradient, x, weight, *where), None)
        found = torch.ops.vivace.batch_norm_nhwc_backward(gradient, x, weight, mean, rstd)
        return (*(one if wanted else None for one, wanted in zip(found, asked, strict=True)), None)


def _forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    found = _forward_shapes(x, weight, bias, epsilon)
    _run("forward", x, x, weight, bias, ctypes.c_double(epsilon), *found)
    return found


def _forward_shapes(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mean, variance, rstd = (x.new_empty(x.shape[1], dtype=torch.float32) for _ in range(3))
    return torch.empty_like(x), mean, variance, rstd


def _backward(
    gradient: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    found = _backward_shapes(gradient, x, weight, mean, rstd)
    _run("backward", x, in_nhwc(gradient.to(x.dtype)), x, weight, mean, rstd, *found)
    return found


def _backward_shapes(
    gradient: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(mean), torch.empty_like(mean)


def _run(name: str, x: Tensor, *given: Tensor | ctypes.c_double | None) -> None:
    images, channels, height, width = x.shape
    half = x.dtype == torch.bfloat16
    shape = _Shape(images * height * width, channels, half, threads_for(x.numel()))
    pointers = [ctypes.c_void_p(one.data_ptr()) if isinstance(one, Tensor) else one for one in given]
    if getattr(compiled(SOURCE), name)(*pointers, ctypes.byref(shape)):
        raise MemoryError("there is no memory left for the sums of a BatchNorm")


_exchange = _Exchange()
begin = _exchange.begin
_LIBRARY = torch.library.Library("vivace", "FRAGMENT")  # type: ignore[no-untyped-call]
for _name, _arguments, _results, _function, _shapes in (
    ("", "Tensor x, Tensor? weight, Tensor? bias, float epsilon", 4, _forward, _forward_shapes),
    (
        "_backward",
        "Tensor gradient, Tensor x, Tensor? weight, Tensor mean, Tensor rstd",
        3,
        _backward,
        _backward_shapes,
    ),
):
    _name = f"batch_norm_nhwc{_name}"
    _LIBRARY.define(f"{_name}({_arguments}) -> ({', '.join(['Tensor'] * _results)})")  # type: ignore[no-untyped-call]
    _LIBRARY.impl(_name, _function, "CPU")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"vivace::{_name}", cast("Any", _shapes), lib=_LIBRARY)
