"""Handwritten digits, the real ones that ship with scikit-learn, and a small residual network."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from vivace.job import Job
from vivace.recipes import showing
from vivace.recipes.networks.classifying import accuracy, loss
from vivace.recipes.sources import check_least, handwritten, training_loader

NUM_TRAINING = 1437  # of 1,797; the rest validates


class Residual(nn.Module):
    """Two 3x3 convolutions around an identity: (batch, channels, height, width) -> the same shape."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The input plus what the block's convolutions make of it."""
        inner = functional.relu(self.first_norm(self.first(x)))
        return functional.relu(x + self.second_norm(self.second(inner)))


def model(width: int = 32, depth: int = 1) -> nn.Module:
    """A residual network for 8x8 images in 10 classes: a level of `width` channels and `depth` blocks, one of
    twice as many channels and blocks; about 260,000 parameters as it is.
    """
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        *(Residual(width) for _ in range(depth)),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        *(Residual(2 * width) for _ in range(2 * depth)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 10),
    )


def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = handwritten.digits()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images[order], labels[order]


def data() -> DataLoader[Any]:
    """Shuffled training batches of 64 images (64, 1, 8, 8) and labels (64,)."""
    images, labels = _digits()
    training = TensorDataset(images[:NUM_TRAINING], labels[:NUM_TRAINING])
    return training_loader(training, 64)


def validation() -> DataLoader[Any]:
    """The 360 digits that no training step sees, in their order."""
    images, labels = _digits()
    return DataLoader(TensorDataset(images[NUM_TRAINING:], labels[NUM_TRAINING:]), batch_size=360)


unseen = validation  # there is no third part: so few digits validate that none is left


def pictures(model: nn.Module, batches: Iterable[Any]) -> showing.Shown:
    """The confusion of digits, and samples."""
    return showing.classified(model, batches, tuple("0123456789"))


def job(*, width: int = 32, depth: int = 1, epochs: int = 15) -> Job:
    """The job. `width` in channels of the first convolution."""
    check_least("width", width, 1)
    check_least("depth", depth, 0)
    return Job(
        model=lambda: model(width, depth),
        data=data,
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(
            model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True
        ),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs),
        metric=accuracy,
        metric_name="accuracy",
        validation=validation,
        pictures=pictures,
        epochs=epochs,
    )
