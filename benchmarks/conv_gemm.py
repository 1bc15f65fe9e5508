"""What `conv_gemm` brings on a CPU in bfloat16: whole steps of ResNet-50, and each of its convolutions.

    scripts/bench conv_gemm [--pairs 12]

16 images of 128 px, channels last, all cores. Steps as they are, with 1x1 windows as products, and with small
maps as well take turns in one process; so do each convolution's gradients of weights, as a convolution and as
a product of columns. Ratios are medians with their 95 % intervals. Writes a record.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import _record
import torch
from torch import Tensor, nn
from torchvision import models

import vivace
from vivace.measuring.statistics import speed_ratio
from vivace.operators import SMALL_MAP
from vivace.technique.registry import find
from vivace.techniques.conv_gemm.columns import convolution_by_columns

BATCH, PIXELS, WARM = 16, 128, 3
WAYS = {"1x1": 0, "1x1 and small maps": SMALL_MAP}


def main() -> None:
    """Time both, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=12)
    pairs = parser.parse_args().pairs
    record = _record.opened("conv_gemm", "scripts/bench conv_gemm", vivace.inspect())
    threads = torch.get_num_threads()
    record["conditions"] = {"batch": BATCH, "pixels": PIXELS, "threads": threads, "dtype": "bfloat16"}
    record["conditions"]["pairs"] = pairs
    record["steps"] = steps(pairs)
    record["gradients_of_weights"] = layers(pairs)
    _record.write(record)
    for name, found in record["steps"].items():
        print(f"{name}: {found}")
    for row in record["gradients_of_weights"]:
        print(row)


def alternated(ways: list[Callable[[], object]], pairs: int) -> list[list[float]]:
    """Seconds of each way, in turns."""
    seconds: list[list[float]] = [[] for _ in ways]
    for turn in range(pairs + WARM):
        for way, spent in zip(ways, seconds, strict=True):
            begin = time.perf_counter()
            way()
            if turn >= WARM:
                spent.append(time.perf_counter() - begin)
    return seconds


def interval(mine: list[float], theirs: list[float]) -> dict[str, float]:
    """How many times faster `theirs` is."""
    ratio = speed_ratio(list(zip(mine, theirs, strict=True)))
    return {"estimate": ratio.estimate, "low": ratio.low, "high": ratio.high}


def steps(pairs: int) -> dict[str, Any]:
    """Whole steps: the ratio of each way to the network as it is."""
    seconds = alternated([step(None), *(step(pixels) for pixels in WAYS.values())], pairs)
    return {name: interval(seconds[0], mine) for name, mine in zip(WAYS, seconds[1:], strict=True)}


def step(window_pixels: int | None) -> Callable[[], None]:
    """A step of a network of its own; None: as it is."""
    torch.manual_seed(0)
    model = models.resnet50(num_classes=10).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    images = torch.randn(BATCH, 3, PIXELS, PIXELS).to(memory_format=torch.channels_last)
    labels = torch.randint(10, (BATCH,))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(batch[0])
        return nn.functional.cross_entropy(outputs.float(), batch[1])

    chosen = [] if window_pixels is None else [find("conv_gemm")(window_pixels=window_pixels)]
    session = vivace.attach(vivace.Plan(chosen), model=model, optimizer=optimizer, loss=loss)
    return lambda: session.step((images, labels))


def layers(pairs: int) -> list[dict[str, Any]]:
    """Of each distinct 3x3 or 1x1 convolution the gradient of its weights, both ways."""
    seen: Counter[tuple[Any, ...]] = Counter()

    def note(module: nn.Module, inputs: tuple[Tensor, ...], _: object) -> None:
        assert isinstance(module, nn.Conv2d)
        shape = tuple(module.weight.shape)
        seen[tuple(inputs[0].shape), shape, module.stride, module.padding] += 1

    network = models.resnet50(num_classes=10).eval()
    for module in network.modules():
        if isinstance(module, nn.Conv2d) and module.in_channels > 3:
            module.register_forward_hook(note)
    with torch.no_grad():
        network(torch.randn(BATCH, 3, PIXELS, PIXELS))
    rows = []
    for (inputs, shape, stride, padding), count in seen.items():
        x = torch.randn(inputs).bfloat16().to(memory_format=torch.channels_last)
        weight = torch.randn(shape).bfloat16().to(memory_format=torch.channels_last).requires_grad_()
        found = (
            nn.functional.conv2d(x, weight, None, stride, padding),
            convolution_by_columns(x, weight, None, stride, padding),
        )
        gradient = torch.randn_like(found[0])
        mine, theirs = alternated([gradient_of(y, weight, gradient) for y in found], pairs)
        rows.append(
            {
                "inputs": inputs,
                "weight": shape,
                "stride": stride,
                "output": tuple(gradient.shape[2:]),
                "count": count,
                "convolution_ms": 1e3 * statistics.median(mine),
                "product_ms": 1e3 * statistics.median(theirs),
                "ratio": interval(mine, theirs),
            }
        )
    return rows


def gradient_of(output: Tensor, weight: Tensor, gradient: Tensor) -> Callable[[], object]:
    """The backward pass of one convolution to its weights alone."""
    return lambda: torch.autograd.grad(output, weight, gradient, retain_graph=True)


if __name__ == "__main__":
    main()
