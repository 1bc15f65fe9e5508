"""Which photograph is this from? Small grey crops of real pictures that ship with scikit-image, and a small
MobileNet."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from vivace.job import Job
from vivace.recipes import showing
from vivace.recipes.networks.classifying import accuracy, loss
from vivace.recipes.sources import check_least, needing, training_loader

PICTURES = (
    "brick",
    "grass",
    "gravel",
    "camera",
    "coins",
    "astronaut",
    "cat",
    "coffee",
    "rocket",
    "hubble_deep_field",
    "immunohistochemistry",
    "moon",
    "page",
    "clock",
    "retina",
    "cell",
)
SIZE = 48  # pixels of a crop's side
BATCH, BATCHES, EPOCHS = 64, 25, 12
TRAINED, HELD_OUT = 128, 64  # each picture in turn: columns that train, columns that only validate
WIDER = 4  # times as many channels inside a block
VALIDATING = 24  # crops of each picture that validate


@functools.cache
def pictures() -> tuple[torch.Tensor, ...]:
    """The photographs in grey, each (height, width), in units of their own spread around their mean."""
    with needing("demo"):
        from skimage import data as shipped
        from skimage.color import rgb2gray
    found = []
    for name in PICTURES:
        picture = getattr(shipped, name)()
        grey = torch.tensor(rgb2gray(picture) if picture.ndim == 3 else picture / 255.0, dtype=torch.float32)
        found.append((grey - grey.mean()) / grey.std())
    return tuple(found)


def bands(picture: torch.Tensor, width: int, offset: int) -> range:
    """The first columns of a picture's bands of `width`, `offset` into each turn of both kinds."""
    return range(offset, picture.shape[1] - width + 1, TRAINED + HELD_OUT)


class Crops(Dataset[tuple[torch.Tensor, int]]):
    """Crops at random places of the columns that train, mirrored at random: (1, 48, 48) and a label."""

    def __len__(self) -> int:
        return BATCH * BATCHES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        label = index % len(PICTURES)
        picture = pictures()[label]
        top = random.randrange(picture.shape[0] - SIZE + 1)
        left = random.randrange(TRAINED - SIZE + 1) + random.choice(bands(picture, TRAINED, 0))
        crop = picture[top : top + SIZE, left : left + SIZE]
        return (crop.flip(1) if random.random() < 0.5 else crop).unsqueeze(0).clone(), label


class Inverted(nn.Module):
    """A wide depthwise convolution between two narrow ones of 1x1, around an identity: (batch, channels,
    height, width) -> the same shape. Source: MobileNetV2 (Sandler et al., 2018).
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = WIDER * channels
        self.inner = nn.Sequential(
            nn.Conv2d(channels, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU(),
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU(),
            nn.Conv2d(wide, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The input plus what the block makes of it."""
        inner: torch.Tensor = self.inner(x)
        return x + inner


def model(width: int = 16, depth: int = 2) -> nn.Module:
    """A small MobileNet for grey crops of 48 pixels in 16 classes: three levels of `depth` blocks, with
    `width`, twice and four times as many channels; about 120,000 parameters as it is.
    """
    layers: list[nn.Module] = []
    channels = 1
    for wider in (width, 2 * width, 4 * width):
        layers += [nn.Conv2d(channels, wider, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(wider)]
        layers += [nn.ReLU(), *(Inverted(wider) for _ in range(depth))]
        channels = wider
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, len(PICTURES)))


def data() -> DataLoader[Any]:
    """Shuffled training batches of 64 crops (64, 1, 48, 48) and labels (64,)."""
    return training_loader(Crops(), BATCH)


def validation() -> DataLoader[Any]:
    """Crops spread over the columns of each picture that never train."""
    crops, labels = [], []
    for label, picture in enumerate(pictures()):
        held_out = bands(picture, HELD_OUT, TRAINED)
        for number in range(VALIDATING):
            top = number * (picture.shape[0] - SIZE) // (VALIDATING - 1)
            left = held_out[number % len(held_out)] + number % (HELD_OUT - SIZE + 1)
            crops.append(picture[top : top + SIZE, left : left + SIZE].unsqueeze(0))
            labels.append(label)
    return DataLoader(TensorDataset(torch.stack(crops), torch.tensor(labels)), batch_size=128)


unseen = validation  # there is no third part


def pictures_of(model: nn.Module, batches: Iterable[Any]) -> showing.Shown:
    """The confusion of photographs, and crops."""
    return showing.classified(model, batches, PICTURES)


def job(*, width: int = 16, depth: int = 2, epochs: int = EPOCHS) -> Job:
    """The job. `width` in channels of the first convolution."""
    check_least("width", width, 1)
    check_least("depth", depth, 0)
    return Job(
        model=lambda: model(width, depth),
        data=data,
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, epochs * BATCHES),
        scheduler_every="step",
        metric=accuracy,
        metric_name="accuracy",
        validation=validation,
        pictures=pictures_of,
        epochs=epochs,
    )
