"""U-Net (Ronneberger et al., 2015, arXiv:1505.04597) with batch normalization."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn import functional


def twice(num_inputs: int, num_outputs: int) -> nn.Sequential:
    """Two 3x3 convolutions, each normalized."""
    layers: list[nn.Module] = []
    for given in (num_inputs, num_outputs):
        layers.append(nn.Conv2d(given, num_outputs, 3, padding=1, bias=False))
        layers += [nn.BatchNorm2d(num_outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Images (batch, channels, height, width) -> logits (batch, classes, height, width).

    `depth` times the sides are halved and the channels doubled, so sides must be multiples of 2 ** depth.
    """

    def __init__(self, num_channels: int, num_classes: int, width: int, depth: int) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(width * 2**level for level in range(depth + 1)))
        self.stem = twice(num_channels, width)
        self.down = nn.ModuleList(twice(narrow, wide) for narrow, wide in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(wide, narrow, 2, stride=2) for narrow, wide in pairs[::-1])
        self.merge = nn.ModuleList(twice(2 * narrow, narrow) for narrow, _ in pairs[::-1])
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """The logits of each pixel."""
        kept = [self.stem(images)]
        for block in self.down:
            kept.append(block(functional.max_pool2d(kept[-1], 2)))
        hidden = kept.pop()
        for grow, block in zip(self.up, self.merge, strict=True):
            hidden = block(torch.cat([kept.pop(), grow(hidden)], dim=1))
        logits: torch.Tensor = self.head(hidden)
        return logits
