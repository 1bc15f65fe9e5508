"""Which pixels are a face, an animal, food, a vehicle, a building? Pictures of the Noto Color Emoji font on
photographs, with exact masks, by a U-Net; or Pascal VOC.

Neither the pictures nor the photographs that validate have trained.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from vivace.errors import InputError
from vivace.job import Job
from vivace.recipes import showing
from vivace.recipes.networks.schedules import adamw, warm_cosine
from vivace.recipes.networks.segmenting import loss, mean_iou
from vivace.recipes.networks.unet import UNet
from vivace.recipes.sources import check_choice, check_least, check_modules, cutouts, scenes, training_loader

SIZE = 64  # pixels of a scene's side
BATCH = 16
SCENES = 1600  # of an epoch
VALIDATED, TESTED = 320, 1000
DATA = ("scenes", "voc")


def row(scene: scenes.Scene) -> tuple[torch.Tensor, torch.Tensor]:
    """An image (3, size, size) and the classes of its pixels (size, size)."""
    return scene.image, scene.mask


def images(split: str, data: str) -> Any:
    """The data set of a split: ``training``, ``validation`` or ``test``."""
    if data == "voc":
        from vivace.recipes.sources.folders import voc_masks

        return voc_masks(split)
    length = {"training": SCENES, "validation": VALIDATED, "test": TESTED}[split]
    return scenes.Scenes(split, length, SIZE, row)


def classes(data: str) -> tuple[str, ...]:
    """The names of a data set's classes; the first is what is none of the others."""
    if data == "voc":
        from vivace.recipes.sources.folders import VOC_CLASSES

        return VOC_CLASSES
    return ("photograph", *cutouts.NAMES)


def unseen(data: str = "scenes") -> DataLoader[Any]:
    """What neither trained nor chose anything."""
    return DataLoader(images("test", data), batch_size=2 * BATCH)


def pictures(model: nn.Module, batches: Iterable[Any], *, data: str) -> showing.Shown:
    """The confusion of pixels, and images under the colours of their classes."""
    return showing.segmented(model, batches, classes(data))


def job(*, width: int = 16, depth: int = 3, epochs: int = 4, data: str = "scenes") -> Job:
    """The job. `data` is ``scenes`` or ``voc``; `width` in channels of the first convolutions; `depth` is how
    often the sides are halved.
    """
    check_choice("data", data, DATA)
    check_least("width", width, 1)
    check_least("depth", depth, 0)
    check_modules("torchmetrics")
    if SIZE % 2**depth:
        raise InputError(f"depth must be at most 6, so that {SIZE} pixels can be halved, not {depth}")

    def model() -> nn.Module:
        return UNet(3, len(classes(data)), width, depth)

    return Job(
        model=model,
        data=lambda: training_loader(images("training", data), BATCH),
        loss=loss,
        optimizer=adamw(3e-3, weight_decay=0.01),
        scheduler=lambda optimizer: warm_cosine(epochs * (len(images("training", data)) // BATCH))(optimizer),
        scheduler_every="step",
        metric=mean_iou,
        metric_name="mean IoU",
        validation=lambda: DataLoader(images("validation", data), batch_size=2 * BATCH),
        pictures=functools.partial(pictures, data=data),
        epochs=epochs,
    )
