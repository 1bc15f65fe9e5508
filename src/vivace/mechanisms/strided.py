"""Strided 1x1 convolutions that a library for CPUs gets wrong, run in a way that it gets right."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vivace.job import Batch
from vivace.technique import Build, Seam

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

    from vivace.mechanisms.graphs import InPlace, put_in_place
    from vivace.tensors.modules import modules_of, patched

    found = [m for model in build.models for m in modules_of(model, nn.Conv2d) if _is_wrong(m)]
    if not found:
        return
    if not build.own_step:
        build.on_close(put_in_place(found, _convolution))
        return
    forwards = [InPlace(module, _convolution, ()) for module in found]

    def run(following: Callable[[Any], Any], batch: Batch) -> Any:
        with patched(found, "forward", forwards):  # not between steps: who copies a model finds its own
            return following(batch)

    build.wrap(Seam.STEP, run)


def _is_wrong(module: nn.Conv2d) -> bool:
    from torch import nn

    from vivace.tensors.modules import both, is_product

    narrow = module.in_channels < BLOCK and max(both(module.stride)) > 1 and not module.weight.is_complex()
    return narrow and type(module) is nn.Conv2d and is_product(module)


def _convolution(
    module: nn.Conv2d, own: Callable[[torch.Tensor], torch.Tensor], input: torch.Tensor
) -> torch.Tensor:
    import torch

    from vivace.tensors.modules import both

    if input.dim() != 4 or not torch.is_grad_enabled():
        return own(input)
    usual = input.stride(1) >= input.shape[-1] and module.weight.stride(-1) == 1
    if usual and not torch.compiler.is_compiling():  # which chooses the order itself
        return own(input)
    down, across = both(module.stride)
    return torch.nn.functional.conv2d(input[:, :, ::down, ::across], module.weight, module.bias)
