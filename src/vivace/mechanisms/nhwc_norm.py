"""BatchNorm of feature maps in NHWC order on a CPU, with sums that round no further than in the other order.

PyTorch's kernels for this order add up a channel's numbers one by one in float32: over 400,000 pixels the
variance is off by 1e-4 of itself, in NCHW order by 1e-7.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from vivace.mechanisms.c_code import compiled, threads_for
from vivace.tensors.modules import in_nhwc, lies_in_nhwc
from vivace.torch_internals.tensors import is_transformed

SOURCE = Path(__file__).with_suffix(".c")
FEWEST_PIXELS = 8192  # of a channel: fewer are summed near enough, and sooner, by PyTorch
_OWN = torch.batch_norm
_is_traced: Any = torch.jit.is_tracing  # type: ignore[attr-defined]


class _Shape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("rows", "channels", "half", "threads")]


class _Acting:
    """How many have begun, and torch's function while somebody has."""

    def __init__(self) -> None:
        self.count, self.found = 0, _OWN
        self.lock = threading.Lock()
        os.register_at_fork(after_in_child=self._unlock)

    def _unlock(self) -> None:
        """In a process that was forked while another thread began, nobody is left who could unlock it."""
        self.lock = threading.Lock()

    @contextlib.contextmanager
    def exactly(self) -> Iterator[None]:
        """Meanwhile `batch_norm` is in the place of torch's. Raises OSError where it cannot be compiled."""
        compiled(SOURCE)
        with self.lock:
            if not self.count:
                self.found, torch.batch_norm = torch.batch_norm, batch_norm
            self.count += 1
        try:
            yield
        finally:
            with self.lock:
                self.count -= 1
                if not self.count and torch.batch_norm is batch_norm:  # else somebody else's stays
                    torch.batch_norm = self.found


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
    """``torch.batch_norm``: in training, of many pixels in NHWC order, by C code while somebody wants it."""
    given = (input, weight, bias, running_mean, running_var)
    watched = torch.compiler.is_compiling() or _is_traced()
    wanted = _acting.count and training is True and not watched
    if not (wanted and _suits(*given)):
        return _OWN(*given, training, momentum, eps, cudnn_enabled)
    return cast("Tensor", _Norm.apply(*given, momentum, eps))  # type: ignore[no-untyped-call]


def _suits(x: Tensor, *by_channel: Tensor | None) -> bool:
    """Are these maps in float32 or bfloat16, in NHWC order alone, and what goes with them in float32?"""
    weight, bias, mean, variance = by_channel
    given = [one for one in by_channel if one is not None]
    if not all(type(one) in (Tensor, nn.Parameter, nn.Buffer) for one in (x, *given)):
        return False
    if x.dim() != 4 or x.device.type != "cpu" or x.dtype not in (torch.float32, torch.bfloat16):
        return False
    pairs = ((weight, bias), (mean, variance))
    if any((one is None) != (other is None) for one, other in pairs) or is_transformed():
        return False
    if x.numel() < max(2, FEWEST_PIXELS) * x.shape[1] or x.is_contiguous() or not lies_in_nhwc(x):
        return False
    moved = any(one is not None and one.requires_grad for one in (mean, variance))
    return not moved and all(_lies_by_channel(one, x) for one in given)


def _lies_by_channel(one: Tensor, x: Tensor) -> bool:
    is_plain = one.dtype == torch.float32 and one.is_contiguous()
    return is_plain and one.shape == x.shape[1:2] and one.device == x.device


class _Norm(torch.autograd.Function):
    """It saves what torch's own saves, in the same order: of a checkpoint either may run again."""

    @staticmethod
    def forward(
        context: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        epsilon: float,
    ) -> Tensor:
        moved = (running_mean, running_var)
        found = torch.ops.vivace.batch_norm_nhwc(x, weight, bias, *moved, momentum, epsilon)
        result, mean, rstd = cast("tuple[Tensor, Tensor, Tensor]", found)
        context.save_for_backward(x, *moved, weight, mean, rstd)
        context.epsilon = epsilon
        return result

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, *moved, weight, mean, rstd = context.saved_tensors
        asked = [*context.needs_input_grad[:3]]
        if torch.is_grad_enabled():  # these gradients are to be differentiated in turn
            where = (*moved, mean, rstd, True, context.epsilon, asked)
            found = torch.ops.aten.native_batch_norm_backward(gradient, x, weight, *where)
        else:
            given = (gradient, x, weight, mean, rstd, asked[0])
            found = torch.ops.vivace.batch_norm_nhwc_backward(*given)
        kept = (one if wanted else None for one, wanted in zip(found, asked, strict=True))
        return (*kept, None, None, None, None)


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    by_channel = (weight, bias, running_mean, running_var)
    result, mean, rstd = _forward_shapes(x, *by_channel, momentum, epsilon)
    numbers = (ctypes.c_double(momentum), ctypes.c_double(epsilon))
    _run("forward", x, x, *by_channel, *numbers, result, mean, rstd)
    return result, mean, rstd


def _forward_shapes(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    mean, rstd = (x.new_empty(x.shape[1], dtype=torch.float32) for _ in range(2))
    return torch.empty_like(x), mean, rstd


def _backward(
    gradient: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, for_input: bool
) -> tuple[Tensor, Tensor, Tensor]:
    found = _backward_shapes(gradient, x, weight, mean, rstd, for_input)
    for_x = found[0] if for_input else None
    given = (in_nhwc(gradient.to(x.dtype)), in_nhwc(x), weight, mean, rstd)
    _run("backward", x, *given, for_x, *found[1:])
    return found


def _backward_shapes(
    gradient: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, for_input: bool
) -> tuple[Tensor, Tensor, Tensor]:
    for_x = torch.empty_like(x, memory_format=torch.channels_last) if for_input else x.new_empty(0)
    return for_x, torch.empty_like(mean), torch.empty_like(mean)


def _run(name: str, x: Tensor, *given: Tensor | ctypes.c_double | None) -> None:
    images, channels, height, width = x.shape
    half = x.dtype == torch.bfloat16
    shape = _Shape(images * height * width, channels, half, threads_for(x.numel()))
    pointers = [ctypes.c_void_p(one.data_ptr()) if isinstance(one, Tensor) else one for one in given]
    if getattr(compiled(SOURCE), name)(*pointers, ctypes.byref(shape)):
        raise MemoryError("there is no memory left for the sums of a BatchNorm")


_acting = _Acting()
exactly = _acting.exactly
_LIBRARY = torch.library.Library("vivace", "FRAGMENT")  # type: ignore[no-untyped-call]
for _name, _arguments, _function, _shapes in (
    (
        "batch_norm_nhwc",
        "Tensor x, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
        "float momentum, float epsilon",
        _forward,
        _forward_shapes,
    ),
    (
        "batch_norm_nhwc_backward",
        "Tensor gradient, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, bool for_input",
        _backward,
        _backward_shapes,
    ),
):
    _LIBRARY.define(f"{_name}({_arguments}) -> (Tensor, Tensor, Tensor)")  # type: ignore[no-untyped-call]
    _LIBRARY.impl(_name, _function, "CPU")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"vivace::{_name}", cast("Any", _shapes), lib=_LIBRARY)
