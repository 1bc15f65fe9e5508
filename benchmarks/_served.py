"""Networks to be served: torchvision's and an LSTM on handwritten digits, a U-Net on noisy discs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import jobs
import torchvision
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Subset, TensorDataset

import vivace

SIZE = 64  # pixels of a side, for networks that were made for photographs


def pictures(*, train: bool) -> TensorDataset:
    """Digits of 64 x 64 pixels in three equal colours."""
    digits = jobs.digits(train=train)
    large = functional.interpolate(digits.tensors[0], SIZE, mode="bilinear", antialias=True)
    return TensorDataset(large.expand(-1, 3, -1, -1).contiguous(), digits.tensors[1])


class RowByRow(nn.Module):
    """Digits (batch, 1, 28, 28), read from above row by row by an LSTM in both directions -> logits."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(28, 128, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(256, jobs.NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """The logits."""
        rows, _ = self.lstm(images.squeeze(1))
        logits: Tensor = self.head(rows.mean(1))
        return logits


resnet18 = dataclasses.replace(
    jobs.small_cnn,
    model=lambda: torchvision.models.resnet18(num_classes=jobs.NUM_CLASSES),
    data=lambda: jobs.loader(pictures(train=True), batch_size=32),
    validation=lambda: DataLoader(pictures(train=False), batch_size=32),
    optimizer=jobs.sgd(0.02),
    epochs=2,
)
mobilenet_v2 = dataclasses.replace(
    resnet18, model=lambda: torchvision.models.mobilenet_v2(num_classes=jobs.NUM_CLASSES), epochs=4
)


def overlap(model: nn.Module, batches: Iterable[jobs.Batch]) -> float:
    """Intersection over union of all masks."""
    both = either = 0
    for images, masks in batches:
        found = model(images) > 0
        both += int((found & (masks > 0)).sum())
        either += int((found | (masks > 0)).sum())
    return both / either


def discs(*, train: bool) -> Subset[tuple[Tensor, ...]]:
    """Noisy images with a bright disc, and its mask; one in three is held out."""
    return Subset(jobs.masked_images(384, size=64), range(256) if train else range(256, 384))


unet = dataclasses.replace(
    jobs.unet,
    data=lambda: jobs.loader(discs(train=True), batch_size=16),
    metric=overlap,
    metric_name="IoU",
    validation=lambda: DataLoader(discs(train=False), batch_size=16),
    epochs=3,
)
lstm: vivace.Job = dataclasses.replace(jobs.small_cnn, model=RowByRow, optimizer=jobs.adam(3e-3), epochs=10)
