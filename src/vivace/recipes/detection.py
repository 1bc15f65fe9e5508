"""Where are faces, animals, food, vehicles and buildings? Pictures of the Noto Color Emoji font on
photographs, with exact boxes, by a small FCOS or torchvision's SSDlite; or the pedestrians of Penn-Fudan.

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
from vivace.recipes.networks import detector, ssdlite
from vivace.recipes.networks.schedules import adamw, clip, warm_cosine
from vivace.recipes.sources import check_choice, check_least, check_modules, cutouts, scenes, training_loader

SIZE = 96  # pixels of a scene's side
BATCH = 16
SCENES = 1600  # of an epoch
VALIDATED, TESTED = 320, 1000
WIDTH, DEPTH = 16, 1
DATA = ("scenes", "penn_fudan")
NETWORKS: dict[str, Any] = {"fcos": detector, "ssdlite": ssdlite}
NUM_CLASSES = {"scenes": len(cutouts.NAMES), "penn_fudan": 1}


def row(scene: scenes.Scene) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """An image (3, size, size), its boxes (most, 4) and their classes (most,)."""
    return scene.image, scene.boxes, scene.labels


def images(split: str, data: str) -> Any:
    """The data set of a split: ``training``, ``validation`` or ``test``."""
    if data == "penn_fudan":
        from vivace.recipes.sources.folders import penn_fudan

        return penn_fudan(split)
    length = {"training": SCENES, "validation": VALIDATED, "test": TESTED}[split]
    return scenes.Scenes(split, length, SIZE, row)


def unseen(data: str = "scenes") -> DataLoader[Any]:
    """What neither trained nor chose anything."""
    return DataLoader(images("test", data), batch_size=2 * BATCH)


def pictures(model: nn.Module, batches: Iterable[Any], *, data: str, network: str) -> showing.Shown:
    """Images with their boxes, and the model's."""
    names = cutouts.NAMES if data == "scenes" else ("pedestrian",)
    return showing.detected(batches, functools.partial(NETWORKS[network].found, model), names)


def job(
    *, width: int = WIDTH, depth: int = DEPTH, epochs: int = 4, data: str = "scenes", network: str = "fcos"
) -> Job:
    """The job. `data` is ``scenes`` or ``penn_fudan``; `network` is ``fcos`` or ``ssdlite``, which is far
    more work. FCOS has a `width` in channels of the first convolution, a multiple of 8, and a `depth` in
    residual units of each of three levels.
    """
    check_choice("data", data, DATA)
    check_choice("network", network, tuple(NETWORKS))
    if network == "ssdlite" and (width, depth) != (WIDTH, DEPTH):
        raise InputError(f"width={width},depth={depth} are of network=fcos: SSDlite has one size")
    if width % 8 or width < 8:
        raise InputError(f"width must be a multiple of 8, not {width}")
    check_least("depth", depth, 1)
    check_modules("torchmetrics", "faster_coco_eval")

    def model() -> nn.Module:
        number = NUM_CLASSES[data]
        return ssdlite.build(number) if network == "ssdlite" else detector.Detector(number, width, depth)

    return Job(
        model=model,
        data=lambda: training_loader(images("training", data), BATCH),
        loss=NETWORKS[network].loss,
        optimizer=adamw(2e-3),
        scheduler=lambda optimizer: warm_cosine(epochs * (len(images("training", data)) // BATCH))(optimizer),
        scheduler_every="step",
        on_gradients=clip,
        metric=functools.partial(detector.mean_average_precision, found=NETWORKS[network].found),
        metric_name="mAP",
        validation=lambda: DataLoader(images("validation", data), batch_size=2 * BATCH),
        pictures=functools.partial(pictures, data=data, network=network),
        epochs=epochs,
    )
