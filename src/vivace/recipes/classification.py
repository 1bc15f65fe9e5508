"""A face, an animal, food, a vehicle or a building? Pictures of the Noto Color Emoji font on photographs; or
CIFAR-10, or an ImageNet folder.

Neither the pictures nor the photographs that validate have trained.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from vivace.job import Job
from vivace.recipes import showing
from vivace.recipes.digits import Residual
from vivace.recipes.networks.classifying import accuracy, loss
from vivace.recipes.networks.schedules import warm_cosine
from vivace.recipes.sources import check_choice, check_least, cutouts, scenes, training_loader

SIZE = 48  # pixels of a scene's side
BATCH = 64
SCENES = 1600  # of an epoch
VALIDATED, TESTED = 640, 2000
SHARES = (0.5, 0.9)  # of the scene's side that a picture's longer side takes
DATA = ("scenes", "cifar10", "imagenet")


def row(scene: scenes.Scene) -> tuple[torch.Tensor, int]:
    """An image (3, size, size) of one picture, and its class."""
    return scene.image, int(scene.labels[0])


def images(split: str, data: str) -> Any:
    """The data set of a split: ``training``, ``validation`` or ``test``."""
    if data == "scenes":
        length = {"training": SCENES, "validation": VALIDATED, "test": TESTED}[split]
        return scenes.Scenes(split, length, SIZE, row, number=1, shares=SHARES)
    from vivace.recipes.sources import folders

    return folders.cifar10(split) if data == "cifar10" else folders.imagenet(split)


def classes(data: str) -> tuple[str, ...]:
    """The names of a data set's classes; of an ImageNet folder, those of its folders."""
    if data == "scenes":
        return tuple(cutouts.NAMES)
    from vivace.recipes.sources import folders

    return folders.CIFAR_CLASSES if data == "cifar10" else tuple(folders.imagenet_classes())


def model(num_outputs: int, width: int, depth: int) -> nn.Module:
    """A residual network of three levels of `depth` units, of `width`, twice and four times as many
    channels.
    """
    layers: list[nn.Module] = []
    channels = 3
    for level in range(3):
        wider = width * 2**level
        layers += [nn.Conv2d(channels, wider, 3, 1 if not level else 2, 1, bias=False), nn.BatchNorm2d(wider)]
        layers += [nn.ReLU(), *(Residual(wider) for _ in range(depth))]
        channels = wider
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_outputs))


def unseen(data: str = "scenes") -> DataLoader[Any]:
    """What neither trained nor chose anything."""
    return DataLoader(images("test", data), batch_size=2 * BATCH)


def pictures(model: nn.Module, batches: Iterable[Any], *, data: str) -> showing.Shown:
    """The confusion of classes, and samples."""
    return showing.classified(model, batches, classes(data))


def job(*, width: int = 16, depth: int = 1, epochs: int = 6, data: str = "scenes") -> Job:
    """The job. `data` is ``scenes``, ``cifar10`` or ``imagenet``; `width` in channels of the first
    convolution.
    """
    check_choice("data", data, DATA)
    check_least("width", width, 1)
    check_least("depth", depth, 0)
    return Job(
        model=lambda: model(len(classes(data)), width, depth),
        data=lambda: training_loader(images("training", data), BATCH),
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True
        ),
        scheduler=lambda optimizer: warm_cosine(epochs * (len(images("training", data)) // BATCH))(optimizer),
        scheduler_every="step",
        metric=accuracy,
        metric_name="accuracy",
        validation=lambda: DataLoader(images("validation", data), batch_size=2 * BATCH),
        pictures=functools.partial(pictures, data=data),
        epochs=epochs,
    )
