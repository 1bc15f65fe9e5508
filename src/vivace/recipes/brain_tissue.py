"""Grey and white matter in a T1-weighted image of the brain: the MNI152 template (2009a) that nilearn
ships, cut into slices, by a U-Net.

One template, the mean of 152 brains, not 152 people: the slices are split by slabs with gaps between, which
says whether the network finds tissue at other heights, and nothing of other brains.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from vivace.errors import InputError
from vivace.job import Job
from vivace.recipes import showing
from vivace.recipes.networks.schedules import adamw, warm_cosine
from vivace.recipes.networks.segmenting import loss, mean_iou
from vivace.recipes.networks.unet import UNet
from vivace.recipes.sources import check_least, check_modules, needing, of_package, training_loader

SIDES = (96, 112)  # pixels of a slice, of 2 mm, from the middle of the volume's
SLAB, GAP = 6, 1  # slices of a slab, and those left out after each
TURN = ("training", "training", "training", "validation", "training", "training", "test")  # of slabs
LEAST = 0.02  # share of a slice that tissue takes
CLASSES = ("other", "grey matter", "white matter")
BATCH = 8
REPEATED = 10  # times that an epoch sees each slice, changed each time
SHIFT = 6  # pixels either way


def _volume(name: str) -> torch.Tensor:
    path = of_package(
        "nilearn", f"nilearn/datasets/data/mni_icbm152_{name}_tal_nlin_sym_09a_converted.nii.gz"
    )
    with needing():
        import nibabel
    image: Any = nibabel.load(path)
    values = torch.from_numpy(image.get_fdata(dtype="float32"))
    return (values / values.max())[::2, ::2, ::2]


@functools.cache
def slices() -> dict[str, TensorDataset]:
    """Slices (number, 1, height, width), from bottom to top, and the classes of their pixels, by split."""
    image, grey, white = (_volume(name) for name in ("t1", "gm", "wm"))
    classes = torch.stack([1 - grey - white, grey, white]).argmax(0)
    middle = [
        slice((length - side) // 2, (length + side) // 2)
        for length, side in zip(image.shape, SIDES, strict=False)
    ]
    image = (image - image.mean()) / image.std()
    image, classes = (v[middle[0], middle[1]].permute(2, 0, 1).contiguous() for v in (image, classes))
    found: dict[str, list[int]] = {split: [] for split in TURN}
    for height in range(len(image)):
        slab, place = divmod(height, SLAB + GAP)
        if place < SLAB and (classes[height] > 0).float().mean() >= LEAST:
            found[TURN[slab % len(TURN)]].append(height)
    return {split: TensorDataset(image[which].unsqueeze(1), classes[which]) for split, which in found.items()}


class Varied(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Training slices, mirrored, shifted, of other contrast and noisy, anew each time."""

    def __init__(self) -> None:
        self.slices = slices()["training"]

    def __len__(self) -> int:
        return REPEATED * len(self.slices)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image, classes = self.slices[index % len(self.slices)]
        if torch.rand(()) < 0.5:
            image, classes = image.flip(-2), classes.flip(-2)  # left for right
        shifts = [int(torch.randint(-SHIFT, SHIFT + 1, ())) for _ in range(2)]
        image, classes = (v.roll(shifts, (-2, -1)) for v in (image, classes))
        contrast, brightness = 1 + 0.2 * torch.randn(()), 0.2 * torch.randn(())
        return image * contrast + brightness + 0.1 * torch.randn(image.shape), classes


def held_out(split: str) -> DataLoader[Any]:
    """A split that does not train, as it is."""
    return DataLoader(slices()[split], batch_size=2 * BATCH)


def unseen() -> DataLoader[Any]:
    """What neither trained nor chose anything."""
    return held_out("test")


def pictures(model: nn.Module, batches: Iterable[Any]) -> showing.Shown:
    """The confusion of pixels, and slices under the colours of their tissues."""
    return showing.segmented(model, batches, CLASSES)


def job(*, width: int = 12, depth: int = 3, epochs: int = 5) -> Job:
    """The job. `width` in channels of the first convolutions; `depth` is how often the sides are halved."""
    check_least("width", width, 1)
    check_modules("torchmetrics")
    if not 1 <= depth <= 4:
        raise InputError(
            f"depth must be 1 to 4, so that {SIDES[0]} and {SIDES[1]} pixels can be halved, not {depth}"
        )

    def model() -> nn.Module:
        return UNet(1, len(CLASSES), width, depth)

    return Job(
        model=model,
        data=lambda: training_loader(Varied(), BATCH),
        loss=loss,
        optimizer=adamw(3e-3, weight_decay=0.01),
        scheduler=lambda optimizer: warm_cosine(epochs * (len(Varied()) // BATCH))(optimizer),
        scheduler_every="step",
        metric=mean_iou,
        metric_name="mean IoU",
        validation=lambda: held_out("validation"),
        pictures=pictures,
        epochs=epochs,
    )
