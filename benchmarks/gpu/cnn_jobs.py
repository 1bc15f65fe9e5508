"""The convolutional networks of the waterfall, at batch 32 and 256; with VIVACE_GPU_DRY=1 tiny ones."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torchvision import models
from workloads import DRY, Prepared, images, jobs, stand_in

import vivace

SIZE, NUM_CLASSES = 224, 1000
UNET_SIZE = 256
BATCHES = (32, 256)
BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "resnet50": models.resnet50,
    "resnext101_32x8d": models.resnext101_32x8d,
    "mobilenet_v3_large": models.mobilenet_v3_large,
    "efficientnet_b0": models.efficientnet_b0,
    "convnext_tiny": models.convnext_tiny,
    "unet": lambda: jobs.UNet((64, 128, 256, 512)),
    "vgg16_bn": models.vgg16_bn,
    "densenet121": models.densenet121,
}
SMALLER = {"unet": {256: 64}}  # 256 px with 64 channels: more does not fit beside the reference


def batch_of(name: str, batch: int) -> int:
    """The batch that stands for `batch` in a job that would not fit."""
    return SMALLER.get(name, {}).get(batch, batch)


def masked(batch: int) -> Callable[[], Prepared]:
    """Noise with a mask to find in it."""
    size = 16 if DRY else UNET_SIZE
    find = images(batch, size, 2)

    def make() -> Prepared:
        found = find()
        found.batches = [(pixels, (pixels[:, :1] > 0).float()) for pixels, _ in found.batches]
        return found

    return make


def job_of(name: str, batch: int) -> vivace.Job:
    """One network at one batch size."""
    unet = name == "unet"
    batch = 4 if DRY else batch_of(name, batch)
    small = (lambda: jobs.UNet((8, 16))) if unet else stand_in
    data = images(batch, 8, 10) if DRY else images(batch, SIZE, NUM_CLASSES)
    return vivace.Job(
        model=small if DRY else BUILDERS[name],
        data=masked(batch) if unet else data,
        loss=jobs.segmentation_loss if unet else jobs.classification_loss,
        optimizer=jobs.sgd(0.01),
    )


globals().update({f"{name}_{batch}": job_of(name, batch) for name in BUILDERS for batch in BATCHES})
