"""1x1 convolutions that leave BatchNorm's statistics, in a child process: right, and how fast are they?"""

from __future__ import annotations

from typing import Any

import torch
from norm_kernels import NormKernels, distance, profiled
from norm_shapes import BATCH, PRODUCTS
from torch.nn import functional
from traffic import product_bytes

from vivace.techniques.fused_batchnorm.kernels import batch_norm
from vivace.techniques.fused_batchnorm.kernels.product import product
from vivace.techniques.fused_batchnorm.kernels.splits import split_rows


class ProductKernels(NormKernels):
    """As its parent, for products."""

    def ablate(self, shape: str) -> dict[str, Any]:
        """Seconds and bytes/s of product and norm at one shape, and those of PyTorch's convolution with the
        same norm behind it.
        """
        rows, inner, width = (8, 16, 16) if self.dry else (BATCH * PRODUCTS[shape][0], *PRODUCTS[shape][1:])
        mine, theirs = (self._profiled(rows, inner, width, spare=spare) for spare in (True, False))
        moved = {"statistics_mm": product_bytes(rows, inner, width, 2)}
        found = {
            name: {"seconds": seconds, "bytes_per_second": moved.get(name, 0.0) / seconds}
            for name, seconds in mine.items()
        }
        return {"kernels": found, "seconds": sum(mine.values()), "pytorch_seconds": sum(theirs.values())}

    def _case(self, seed: int, dtype: torch.dtype) -> dict[str, float]:
        draw = torch.Generator().manual_seed(seed)
        large = 3 if self.dry else 64
        sizes = [int(torch.randint(1, high, (), generator=draw)) for high in (9, large, 24, 24, large)]
        batch, inner, height, across, width = sizes[0], 8 * sizes[1], sizes[2], sizes[3] + 1, 8 * sizes[4]
        x = torch.randn(batch, inner, height, across, generator=draw).to(self.device, dtype) + 1
        weight = (torch.randn(width, inner, 1, 1, generator=draw) / inner).to(self.device, dtype)
        (y, statistics), again = product(x, weight), product(x, weight)
        assert torch.equal(y, again[0]), (seed, "not repeatable")
        assert torch.equal(statistics, again[1]), (seed, "not repeatable")
        exact = (x.double(), weight.double())
        size = functional.conv2d(*(t.abs() for t in exact))
        means = [torch.zeros(width, device=self.device), torch.ones(width, device=self.device)]
        true = [t.double() for t in means]
        spared = (statistics, split_rows(y.numel() // width, width))
        seen = batch_norm.fused(y, None, batch_norm.Norm(None, None, *means, 0.1, 1e-5, spared))
        wanted = functional.batch_norm(y.double(), *true, None, None, True, 0.1, 1e-5)
        return {
            "product": distance(y, functional.conv2d(*exact), size),
            "output": distance(seen, wanted, wanted),
            "running mean": distance(means[0], true[0], y.double().square().mean((0, 2, 3)).sqrt()),
            "running variance": distance(means[1], true[1], true[1]),
        }

    def _profiled(self, rows: int, inner: int, width: int, *, spare: bool) -> dict[str, float]:
        """Seconds of each kernel of a 1x1 convolution and the BatchNorm behind it, forward, by name."""
        x = torch.randn(1, inner, rows, 1, device=self.device).bfloat16()
        x = x.to(memory_format=torch.channels_last)
        weight = torch.randn(width, inner, 1, 1, device=self.device).bfloat16()
        options = (*(torch.ones(width, device=self.device) for _ in range(4)), 0.1, 1e-5)

        def step() -> None:
            spared, y = None, None
            if spare:
                y, statistics = product(x, weight)
                spared = (statistics, split_rows(rows, width))
            y = functional.conv2d(x, weight) if y is None else y
            batch_norm.fused(y, None, batch_norm.Norm(*options, spared), "relu")

        return profiled(step)
