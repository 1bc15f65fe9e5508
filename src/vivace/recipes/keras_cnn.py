"""The network of Keras' MNIST example (keras-team/keras, examples/mnist_cnn.py, 2015): two convolutions,
pooling, dropout and two dense layers, with Adadelta. On handwritten digits of scikit-learn at MNIST's 28x28
pixels, or on MNIST.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from vivace.errors import InputError
from vivace.job import Job
from vivace.recipes.digits import pictures
from vivace.recipes.networks.classifying import accuracy, loss
from vivace.recipes.sources import check_choice, check_least, handwritten, training_loader

SIZE = 28  # pixels of a side
BATCH = 128
HELD_OUT = 300  # of scikit-learn's 1,797, that validate; as many test
DATA = ("digits", "mnist")


@functools.cache
def _digits() -> dict[str, TensorDataset]:
    small, labels = handwritten.digits()
    images = functional.interpolate(small, size=(SIZE, SIZE), mode="bilinear")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    ends = {
        "test": order[:HELD_OUT],
        "validation": order[HELD_OUT : 2 * HELD_OUT],
        "training": order[2 * HELD_OUT :],
    }
    return {split: TensorDataset(images[which], labels[which]) for split, which in ends.items()}


def images(split: str, data: str) -> Dataset[Any]:
    """One split: images (1, 28, 28) and labels."""
    if data == "mnist":
        from vivace.recipes.sources.folders import mnist

        return mnist(split)
    return _digits()[split]


def model(width: int, depth: int) -> nn.Module:
    """`depth` convolutions of 3x3, the first of `width` channels, each further one of twice as many as it."""
    layers: list[nn.Module] = []
    for number in range(depth):
        given = 1 if not number else width * (2 if number > 1 else 1)
        layers += [nn.Conv2d(given, width * (2 if number else 1), 3), nn.ReLU()]
    channels = width * (2 if depth > 1 else 1)
    side = (SIZE - 2 * depth) // 2
    return nn.Sequential(
        *layers,
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(channels * side * side, 4 * width),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(4 * width, 10),
    )


def unseen(data: str = "digits") -> DataLoader[Any]:
    """What neither trained nor chose anything."""
    return DataLoader(images("test", data), batch_size=2 * BATCH)


def job(*, width: int = 32, depth: int = 2, epochs: int = 24, data: str = "digits") -> Job:
    """The job. `data` is ``digits`` or ``mnist``; `width` in channels of the first convolution."""
    check_choice("data", data, DATA)
    check_least("width", width, 1)
    if not 1 <= depth <= 12:
        raise InputError(f"depth must be 1 to 12 convolutions, not {depth}")
    return Job(
        model=lambda: model(width, depth),
        data=lambda: training_loader(images("training", data), BATCH),
        loss=loss,
        optimizer=lambda model: torch.optim.Adadelta(model.parameters(), lr=1.0),
        metric=accuracy,
        metric_name="accuracy",
        validation=lambda: DataLoader(images("validation", data), batch_size=2 * BATCH),
        pictures=pictures,
        epochs=epochs,
    )
