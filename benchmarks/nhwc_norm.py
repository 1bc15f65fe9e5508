"""How exactly BatchNorm sums on a CPU, beside float64.

    scripts/bench nhwc_norm [--pairs 12]

In PyTorch's usual memory order, in its channels-last one, and with `channels_last`: of feature maps, errors
of the variance and of the weights' gradient, and how many times as fast a forward and backward pass is as
PyTorch's in the same order, in turns, on all cores; of networks in training mode, the error of all gradients
together. Writes a record.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from typing import Any

import _record
import torch
from conv_gemm import alternated, interval
from torch import Tensor
from torch.nn import functional
from torchvision import models

import vivace
from vivace.mechanisms import nhwc_norm

MAPS = ((64, 64, 112), (32, 64, 112), (16, 64, 64), (16, 256, 32), (32, 128, 28))  # images, channels, pixels
NETWORKS = ("mobilenet_v3_large", "efficientnet_b0", "resnet18")
IMAGES, PIXELS = 16, 160  # of a network's batch
FAR = 1.0  # means of numbers and of gradients, in deviations
USUAL, LAST = torch.contiguous_format, torch.channels_last
WAYS = {"usual": (USUAL, False), "channels_last_by_pytorch": (LAST, False), "channels_last": (LAST, True)}


def main() -> None:
    """Measure both, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=12)
    pairs = parser.parse_args().pairs
    record = _record.opened("nhwc_norm", "scripts/bench nhwc_norm", vivace.inspect())
    record["conditions"] = {"pairs": pairs, "threads": torch.get_num_threads(), "dtype": "float32"}
    record["maps"] = [of_maps(*shape, pairs) for shape in MAPS]
    record["networks"] = {name: of_network(name) for name in NETWORKS}
    _record.write(record)
    for row in (*record["maps"], *record["networks"].items()):
        print(row, flush=True)


def of_maps(images: int, channels: int, pixels: int, pairs: int) -> dict:
    """Errors by way, and the ratio of times."""
    numbers = torch.Generator().manual_seed(0)
    x, gradient = (torch.randn(images, channels, pixels, pixels, generator=numbers) + FAR for _ in range(2))
    weight = torch.rand(channels, generator=numbers) + 0.5
    exact = moments(x.double(), gradient.double())
    errors: dict[str, dict[str, float]] = {}
    for name, (order, ours) in WAYS.items():
        found = in_way(ours, lambda order=order: normed(*laid(order, x, gradient), weight))
        errors[name] = dict(zip(("variance", "gradient_of_weights"), map(error, found, exact), strict=True))
    x, gradient = laid(LAST, x, gradient)
    ways = [lambda ours=ours: in_way(ours, lambda: normed(x, gradient, weight)) for ours in (False, True)]
    theirs, mine = alternated(ways, pairs)
    shape = {"images": images, "channels": channels, "pixels": pixels}
    return {**shape, "errors": errors, "ratio": interval(theirs, mine)}


def moments(x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The variance of each channel, and the gradient of each weight."""
    centred = x - x.mean((0, 2, 3), keepdim=True)
    variance = centred.square().mean((0, 2, 3))
    return variance, (gradient * centred).sum((0, 2, 3)) / (variance + 1e-5).sqrt()


def normed(x: Tensor, gradient: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The same by a BatchNorm, forward and backward."""
    inputs = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
    running = torch.zeros(len(weight)), torch.zeros(len(weight))
    result = functional.batch_norm(inputs[0], *running, inputs[1], torch.zeros(len(weight)), True, 1.0, 1e-5)
    pixels = x.numel() // len(weight)
    return running[1] * ((pixels - 1) / pixels), torch.autograd.grad(result, inputs, gradient)[1]


def of_network(name: str) -> dict[str, float]:
    """The error of the gradient by way."""
    numbers = torch.Generator().manual_seed(0)
    images = torch.randn(IMAGES, 3, PIXELS, PIXELS, generator=numbers)
    labels = torch.randint(10, (IMAGES,), generator=numbers)

    def gradient(order: torch.memory_format, dtype: torch.dtype) -> Tensor:
        torch.manual_seed(0)
        model = models.get_model(name, weights=None, num_classes=10).to(dtype=dtype, memory_format=order)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        given = images.to(dtype=dtype, memory_format=order)
        functional.cross_entropy(model(given), labels).backward()
        return torch.cat([parameter.grad.double().flatten() for parameter in model.parameters()])

    exact = gradient(USUAL, torch.float64)
    return {
        way: error(in_way(ours, lambda order=order: gradient(order, torch.float32)), exact)
        for way, (order, ours) in WAYS.items()
    }


def in_way(ours: bool, compute: Callable[[], Any]) -> Any:
    """What is computed, by our sums or by PyTorch's."""
    with nhwc_norm.exactly() if ours else contextlib.nullcontext():
        return compute()


def laid(order: torch.memory_format, *maps: Tensor) -> list[Tensor]:
    """The maps in a memory order."""
    return [one.contiguous(memory_format=order) for one in maps]


def error(found: Tensor, exact: Tensor) -> float:
    """Of the norm."""
    return float((found.double() - exact).norm() / exact.norm())


if __name__ == "__main__":
    main()
