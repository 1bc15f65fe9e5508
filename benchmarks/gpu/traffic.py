"""Bytes that a training step of a convolutional network must move, kernel by kernel, and the time for them.

Counted on meta tensors, which need neither memory nor a GPU, from the operators that would run: one kernel
an operator, each reading its inputs and writing its output once, BatchNorm twice over its inputs. Feature
maps are in NHWC order, weights in the same dtype; the update is left out, it does not grow with the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vivace.matching import install
from vivace.profile.work import Kernel, count_work

BATCH = 64
# Vendor's figures of an H200, of which the published bounds are made: bytes/s, dense bf16 operations/s.
H200 = (4.8e12, 989e12)
BETWEEN_CONVOLUTIONS = ("norm", "elementwise")


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The kernels of a step of `batch` images."""

    kernels: tuple[Kernel, ...]
    batch: int = BATCH

    @property
    def bytes(self) -> float:
        """Bytes an image."""
        return sum(kernel.bytes for kernel in self.kernels) / self.batch

    @property
    def flops(self) -> float:
        """Operations of matrix kernels an image."""
        return sum(kernel.flops for kernel in self.kernels) / self.batch

    def bound(self, bandwidth: float, rate: float) -> float:
        """Images/s where every kernel runs at the memory's or the matrix units' rate, one after the other."""
        return self.batch / sum(max(k.bytes / bandwidth, k.flops / rate) for k in self.kernels)

    def without_passes(self) -> Traffic:
        """What is left where norms, activations and additions happen inside of convolutions.

        The convolutions read and write what they did; the gradient's sum where a shortcut forks stays.
        """
        kept = [k for k in self.kernels if k.operator not in BETWEEN_CONVOLUTIONS or k.name == "add"]
        return Traffic(tuple(kept), self.batch)


def traffic(
    build: Callable[[], nn.Module],
    size: int,
    dtype: torch.dtype,
    *,
    fused: bool,
    loss: Callable[[Any], torch.Tensor] | None = None,
    batch: int = BATCH,
) -> Traffic:
    """Count one forward and backward pass over `batch` square images of `size` pixels; `fused`: as
    `fused_batchnorm` runs it. Norms keep their own dtype of weights, fp32.
    """
    with torch.device("meta"):
        model = build().to(dtype).to(memory_format=torch.channels_last).train()
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.float()
        images = torch.empty(batch, 3, size, size, dtype=dtype).to(memory_format=torch.channels_last)
    undo, _ = install(model, {}) if fused else (lambda: None, False)

    def step() -> None:
        outputs = model(images).float()
        (outputs.mean() if loss is None else loss(outputs)).backward()

    try:
        return Traffic(count_work(step).kernels, batch)
    finally:
        undo()


def norm_bytes(num_rows: int, width: int, item: int, *, residual: bool) -> dict[str, float]:
    """Bytes that each of `fused_batchnorm`'s large kernels must move for one BatchNorm with a ReLU.

    `residual`: something is added; then the backward's first pass writes the gradient that the second reads.
    """
    values, bits = num_rows * width * item, num_rows * width / 8
    extra = values if residual else 0.0
    return {
        "batch_norm_statistics": values,
        "batch_norm_apply": 2 * values + extra + bits,
        "batch_norm_backward_sums": 2 * values + extra + bits,
        "batch_norm_backward_apply": 3 * values + (0.0 if residual else bits),
    }
