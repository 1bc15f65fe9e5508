"""Strided 1x1 convolutions that a library for CPUs gets wrong, run in a way that it gets right."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from vivace.errors import Refused
from vivace.technique import Build
from vivace.tensors.modules import both
from vivace.tensors.settings import hold
from vivace.torch_internals.modules import is_compiled, script_as

if TYPE_CHECKING:
    Size: TypeAlias = int | Sequence[int]

BLOCK = 16  # channels: of fewer, oneDNN sets aside less memory than it writes
_OWN = torch.conv2d


def mend_strided(build: Build) -> None:
    """Let narrow 1x1 convolutions at a stride read the pixels that they use, where a plan acts on a CPU.

    In channels-last order oneDNN's gradient of their weights writes past its memory, which ends the process
    or changes other numbers: https://github.com/uxlfoundation/oneDNN/issues/6035. Several techniques bring
    that order about. In the usual order, which is right, they stay as they are.
    """
    if build.device.type != "cpu" or not any(map(_has_narrow, build.models)):
        return
    if build.own_step and any(is_compiled(module) for model in build.models for module in model.modules()):
        return  # by the person, with torch's function
    # Until the session closes: in the backward pass a checkpoint calls it again.
    build.on_close(_in_its_place())


def _has_narrow(model: nn.Module) -> bool:
    return any(_is_narrow(weight) for weight in model.parameters() if not nn.parameter.is_lazy(weight))


def _is_narrow(weight: torch.Tensor) -> bool:
    return weight.dim() == 4 and weight.shape[2:] == (1, 1) and weight.shape[1] < BLOCK


def _in_its_place() -> Callable[[], None]:
    """Put `conv2d` in the place of torch's, where no other one is; returns what puts that back."""
    undo = contextlib.ExitStack()
    for owner in (torch, functional):
        read, write = partial(getattr, owner, "conv2d"), partial(_write, owner)
        if read() in (_OWN, conv2d):
            undo.callback(hold((id(owner), "conv2d"), read, write, conv2d))
    return undo.close


def _write(owner: ModuleType, function: Callable[..., torch.Tensor]) -> None:
    """What somebody else has put there meanwhile stays."""
    if owner.conv2d in (_OWN, conv2d):
        owner.conv2d = function  # type: ignore[attr-defined]


def conv2d(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Size = 1,
    padding: str | Size = 0,
    dilation: Size = 1,
    groups: int = 1,
) -> torch.Tensor:
    """``torch.conv2d``: of a window of one pixel at a stride, on the pixels that it uses."""
    is_usual = groups != 1 or padding == "same" or not isinstance(stride, int | list | tuple)
    down, across = (1, 1) if is_usual else both(stride)
    if max(down, across) == 1 or _is_right(input, weight):
        return _OWN(input, weight, bias, stride, padding, dilation, groups)
    high, wide = (0, 0) if isinstance(padding, str) else both(padding)
    if high or wide:
        input = functional.pad(input, (wide, wide, high, high))
    return _OWN(input[..., ::down, ::across], weight, bias)


def _is_right(input: torch.Tensor, weight: torch.Tensor) -> bool:
    """Is the window wider, or no gradient asked for? Or is it sure that neither lies in channels-last order?
    Strides of one pixel, or one channel, do not tell; and what is compiled gets its order later.
    """
    if not isinstance(input, torch.Tensor) or input.layout != torch.strided:
        return True
    if not _is_narrow(weight) or weight.is_complex():
        return True
    usual = weight.stride(-1) == 1 and input.is_contiguous() and input.stride(-3) > 1
    return not torch.is_grad_enabled() or (usual and not torch.compiler.is_compiling())


with contextlib.suppress(Refused):
    script_as(conv2d, "aten::conv2d")
