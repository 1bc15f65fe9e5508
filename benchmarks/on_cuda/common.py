"""What the CUDA scripts share: the device, the time, a residual network's convolutions, and the loop."""

from __future__ import annotations

import os
import sys
import time

import torch
from torch import nn
from torch.nn import functional

MENDED = "--mended" in sys.argv
SECONDS = float(os.environ.get("PLANTED_SECONDS", "12"))
DEVICE = "cuda"
LARGE = os.environ.get("VIVACE_GPU_DRY") != "1"


def convolutions(width=256 if LARGE else 8, layers=4):
    """Convolutions with BatchNorm, and a classifier."""
    body = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU()]
    for _ in range(layers):
        body += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)).to(DEVICE)


def small(width=64, layers=12):
    """Linear layers whose kernels are shorter than their launch."""
    body = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*body, nn.Linear(width, 10)).to(DEVICE)


def train(model, batches, step):
    """`step(optimizer, inputs, labels)` over the batches, again and again."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        for inputs, labels in batches:
            step(optimizer, inputs, labels)
            if time.monotonic() > end:
                break


def learn(model, optimizer, inputs, labels):
    """Forward, backward, update; the loss."""
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    return loss


def ready(shape, count=8):
    """Batches that lie on the device."""
    return [
        (torch.randn(shape, device=DEVICE), torch.randint(10, shape[:1], device=DEVICE)) for _ in range(count)
    ]
