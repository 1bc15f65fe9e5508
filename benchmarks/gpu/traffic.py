"""Bytes that a training step of a convolutional network must move, kernel by kernel, and the time for them.

Counted on meta tensors, which need neither memory nor a GPU, from the operators that would run. Each kernel
reads its inputs and writes its outputs once; BatchNorm reads its feature maps twice, each way; the backward
pass of a convolution is two kernels, and both read the gradient. Feature maps are in NHWC order, weights in
the same dtype; the optimizer's update is left out, since it does not grow with the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from vivace.techniques.fused_batchnorm.matching import install
from vivace.work.count import count_work
from vivace.work.kernel import Kernel

BATCH = 64
# Vendor's figures of an H200, of which the published bounds are made: bytes/s, dense bf16 operations/s.
H200 = (4.8e12, 989e12)
FORGOTTEN = ("clone",)  # on meta tensors a convolution forgets the memory order, and no GPU makes that copy


class Pass(NamedTuple):
    """One kernel: its operator, class and work."""

    name: str
    kind: str
    bytes: float
    flops: float


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The kernels of a step of `batch` images."""

    passes: tuple[Pass, ...]
    batch: int

    @property
    def bytes(self) -> float:
        """Bytes an image."""
        return sum(one.bytes for one in self.passes) / self.batch

    @property
    def flops(self) -> float:
        """Operations of matrix kernels an image."""
        return sum(one.flops for one in self.passes) / self.batch

    def bound(self, bandwidth: float, rate: float) -> float:
        """Images/s where every kernel runs at the memory's or the matrix units' rate, one after the other."""
        return self.batch / sum(max(one.bytes / bandwidth, one.flops / rate) for one in self.passes)


def traffic(
    build: Callable[[], nn.Module],
    size: int,
    dtype: torch.dtype,
    *,
    fused: bool,
    products: bool = False,
    loss: Callable[[Any], torch.Tensor] | None = None,
    batch: int = BATCH,
) -> Traffic:
    """Count one forward and backward pass over `batch` square images of `size` pixels.

    `fused`: as `fused_batchnorm` runs it; `products`: with its setting of that name. Norms keep their own
    dtype of weights, fp32.
    """
    with torch.device("meta"):
        model = build().to(dtype).to(memory_format=torch.channels_last).train()
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.float()
        images = torch.empty(batch, 3, size, size, dtype=dtype).to(memory_format=torch.channels_last)
    undo, _ = install(model, {}, products=products) if fused else (lambda: None, False)

    def step() -> None:
        outputs = model(images).float()
        (outputs.mean() if loss is None else loss(outputs)).backward()

    try:
        kernels = count_work(step).kernels
    finally:
        undo()
    return Traffic(tuple(one for k in kernels for one in _passes(k)), batch)


def _passes(kernel: Kernel) -> Iterator[Pass]:
    """The kernels that an operator is on a GPU."""
    reads, writes = [a.bytes for a in kernel.reads], [a.bytes for a in kernel.writes]
    if kernel.name in FORGOTTEN:
        return
    if kernel.name == "convolution_backward":
        gradient, x, weight = reads[:3]
        for_x = writes[0] if kernel.writes[0].num_elements == kernel.reads[1].num_elements else 0
        sides = [(gradient + weight + for_x, for_x), (gradient + x + weight, 1)]
        num_sides = sum(1 for _, there in sides if there)
        for moved, there in sides:
            if there:
                yield Pass(kernel.name, kernel.operator, moved, kernel.flops / num_sides)
    elif kernel.name == "batch_norm_moments":
        yield Pass("batch_norm_statistics", "norm", reads[0], 0)  # or, of these, the sum
    elif kernel.name == "batch_norm_backward" and kernel.operator == "norm" and len(writes) == 6:
        gradient, x, bits = reads[:3]
        maps = [r for r in reads if 2 * r >= x]  # gradients, one or two, x, and a residual with a norm
        joined = writes[4] > 0  # the gradient of that norm's weight
        yield Pass("batch_norm_backward_sums", "norm", sum(maps) + bits + (0 if joined else writes[1]), 0)
        again = gradient + x if writes[1] and not joined else sum(maps) + bits
        yield Pass("batch_norm_backward_apply", "norm", again + writes[0] + (writes[1] if joined else 0), 0)
    else:
        yield Pass(kernel.name, kernel.operator, kernel.bytes, kernel.flops)


def product_bytes(num_rows: int, inner: int, width: int, item: int) -> float:
    """Bytes that a 1x1 convolution must move; its statistics are hundreds of times smaller."""
    return (num_rows * (inner + width) + inner * width) * item


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
