"""Strided 1x1 convolutions that a library for CPUs gets wrong, run in a way that it gets right."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vivace.technique import Build

if TYPE_CHECKING:
    import torch
    from torch import nn

BLOCK = 16  # channels: of fewer, oneDNN sets aside less memory than it writes


def mend_strided(build: Build) -> None:
    """Let narrow 1x1 convolutions at a stride read the pixels that they use, where a plan acts on a CPU.

    In channels-last order oneDNN's gradient of their weights writes past its memory, which ends the process
    or changes other numbers: https://github.com/uxlfoundation/oneDNN/issues/6035. Several techniques bring
    that order about. In the usual order, which is right, the layer stays as it is.
    """
    if build.device.type != "cpu":
        return
    from torch import nn

    from vivace.mechanisms.forwards import act_in_steps
    from vivace.tensors.modules import modules_of

    found = [m for model in build.models for m in modules_of(model, nn.Conv2d) if _is_wrong(m)]
    if found:
        act_in_steps(build, found, _convolution)


def _is_wrong(module: nn.Conv2d) -> bool:
    from torch import nn

    from vivace.tensors.modules import both, padding_of
    from vivace.torch_internals.modules import convolves_as

    plain = both(module.kernel_size) == (1, 1) and module.groups == 1 and padding_of(module) is not None
    narrow = module.in_channels < BLOCK and max(both(module.stride)) > 1 and plain
    # Not by the weight: one that is computed may change what it is computed from.
    return narrow and convolves_as(module, nn.Conv2d) and not any(p.is_complex() for p in module.parameters())


def _is_usual(module: nn.Conv2d, input: torch.Tensor) -> bool:
    """Is it sure that neither the input nor the weight lies in channels-last order? Strides of one pixel, or
    one channel, do not tell.
    """
    from torch.nn.utils.parametrize import is_parametrized

    # A computed weight lies as what it is computed from.
    weights = module.parameters() if is_parametrized(module, "weight") else [module.weight]
    usual = all(weight.stride(-1) == 1 for weight in weights if weight.dim() == 4)
    return usual and input.is_contiguous() and input.stride(1) > 1


def _convolution(
    module: nn.Conv2d, own: Callable[[torch.Tensor], torch.Tensor], input: torch.Tensor
) -> torch.Tensor:
    import torch

    from vivace.tensors.modules import both, padding_of

    # Settings may have changed since it was put there.
    if not _is_wrong(module) or input.dim() != 4 or not torch.is_grad_enabled():
        return own(input)
    if not torch.compiler.is_compiling() and _is_usual(module, input):  # it chooses the order itself
        return own(input)
    down, across = both(module.stride)
    high, wide = padding_of(module) or (0, 0)
    if high or wide:
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        input = torch.nn.functional.pad(input, (wide, wide, high, high), mode)
    return torch.nn.functional.conv2d(input[:, :, ::down, ::across], module.weight, module.bias)
