"""Data sets that lie below VIVACE_DATA as torchvision's own readers expect them; nothing is downloaded."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image
from torch.utils.data import Dataset, Subset, TensorDataset

from vivace.errors import InputError
from vivace.recipes.sources import demanded, needing

MEAN, SPREAD = 0.45, 0.25  # of a pixel's values
CIFAR_VALIDATED = 5000  # of its 50,000 that train
CIFAR_CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
VOC_CLASSES = (
    *("background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus"),
    *("car", "cat", "chair", "cow", "diningtable", "dog", "horse"),
    *("motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
MNIST_VALIDATED = 5000  # of its 60,000 that train
IMAGENET_SIZE, VOC_SIZE, PENN_FUDAN_SIZE = 128, 128, 128  # pixels of a side
PENN_FUDAN_MOST = 8  # people of an image


def _tensor(picture: Image.Image, size: int | None = None) -> torch.Tensor:
    """(3, height, width) around zero."""
    picture = picture.convert("RGB")
    if size is not None:
        picture = picture.resize((size, size), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(numpy.array(picture)).permute(2, 0, 1).float() / 255
    return (pixels - MEAN) / SPREAD


def _read(what: str, how: str, read: Callable[[], Any]) -> Any:
    """What torchvision's reader finds. Raises InputError, with `how`, where it finds the files wanting."""
    try:
        return read()
    except (AssertionError, OSError, RuntimeError, ValueError) as error:
        why = error if isinstance(error, OSError) else how  # torchvision's advice is to let it download
        raise InputError(f"{what} cannot be read as it lies below VIVACE_DATA: {why}") from error


class Mapped(Dataset[Any]):
    """What `change` makes of each sample."""

    def __init__(self, samples: Any, change: Callable[[Any], Any]) -> None:
        self.samples, self.change = samples, change

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.change(self.samples[index])


def _part(samples: Any, split: str, num_validated: int) -> Any:
    """Of the samples that are there to train, those that train, or the ones that are held out of them."""
    order = list(range(len(samples)))
    random.Random(0).shuffle(order)
    cut = min(num_validated, len(order) // 5)
    return Subset(samples, order[:cut] if split == "validation" else order[cut:])


@functools.cache
def cifar10(split: str) -> Dataset[Any]:
    """CIFAR-10 (Krizhevsky, 2009): images (3, 32, 32), cropped and mirrored at random in training; labels."""
    samples = _cifar10(split != "test")
    kept = samples if split == "test" else _part(samples, split, CIFAR_VALIDATED)

    def change(sample: Any) -> Any:
        image = _tensor(sample[0])
        return (_cropped(image, 4) if split == "training" else image), sample[1]

    return Mapped(kept, change)


@functools.cache
def _cifar10(trains: bool) -> Any:
    with needing():
        from torchvision.datasets import CIFAR10
    how = "unpack cifar-10-python.tar.gz there"
    place = demanded("CIFAR-10", "cifar-10-batches-py", how=how).parent
    return _read("CIFAR-10", how, lambda: CIFAR10(place, train=trains))


def _cropped(image: torch.Tensor, margin: int) -> torch.Tensor:
    """Shifted by `margin` pixels at most, what comes in being black, and mirrored as it falls."""
    height, width = image.shape[-2:]
    wide = torch.nn.functional.pad(image, [margin] * 4, value=-MEAN / SPREAD)
    top, left = (int(torch.randint(2 * margin + 1, ())) for _ in range(2))
    image = wide[:, top : top + height, left : left + width]
    return image.flip(-1) if torch.rand(()) < 0.5 else image


@functools.cache
def mnist(split: str) -> Dataset[Any]:
    """MNIST (LeCun et al., 1998): images (1, 28, 28) between 0 and 1, and labels."""
    samples = _mnist(split != "test")
    return samples if split == "test" else _part(samples, split, MNIST_VALIDATED)


@functools.cache
def _mnist(trains: bool) -> TensorDataset:
    with needing():
        from torchvision.datasets import MNIST
    how = "put the four files of MNIST into MNIST/raw there, unpacked: train-images-idx3-ubyte and so on"
    place = demanded("MNIST", "MNIST/raw", how=how).parent.parent
    found = _read("MNIST", how, lambda: MNIST(place, train=trains))
    return TensorDataset(found.data.unsqueeze(1).float() / 255, found.targets)


IMAGENET_NEEDS = "it needs the folders train and val, with a folder for each class in both"


def _imagenet(part: str) -> Path:
    return demanded("an ImageNet folder", f"imagenet/{part}", how=IMAGENET_NEEDS)


def imagenet_classes() -> dict[str, int]:
    """The numbers of the classes that the person's ImageNet folder trains, by their folders' names."""
    names = sorted(path.name for path in _imagenet("train").iterdir() if path.is_dir())
    return {name: number for number, name in enumerate(names)}


@functools.cache
def imagenet(split: str) -> Dataset[Any]:
    """A folder as ImageNet's: images (3, 128, 128) and labels; its `val`, by halves, validates and tests.

    A class has one number, that of `train`, on both sides; `val` may lack some.
    """
    with needing():
        from torchvision.datasets import ImageFolder
        from torchvision.transforms import v2

    place, known = _imagenet("train" if split == "training" else "val"), imagenet_classes()
    samples = _read("the ImageNet folder", IMAGENET_NEEDS, lambda: ImageFolder(place))
    if strangers := [name for name in samples.classes if name not in known]:
        raise InputError(f"'{place}' has a folder '{strangers[0]}', and '{_imagenet('train')}' has none")
    numbers = [known[name] for name in samples.classes]
    if split == "training":
        crop = v2.Compose([v2.RandomResizedCrop(IMAGENET_SIZE, (0.35, 1.0)), v2.RandomHorizontalFlip()])
        return Mapped(samples, lambda sample: (_tensor(crop(sample[0])), sample[1]))
    half = Subset(samples, range(0 if split == "validation" else 1, len(samples), 2))
    return Mapped(half, lambda sample: (_tensor(sample[0], IMAGENET_SIZE), numbers[sample[1]]))


@functools.cache
def voc_masks(split: str) -> Dataset[Any]:
    """Pascal VOC 2012 (Everingham et al.): images (3, 128, 128) and classes of pixels; its `val`, by halves,
    validates and tests.
    """
    with needing():
        from torchvision.datasets import VOCSegmentation

    how = "unpack VOCtrainval_11-May-2012.tar there"
    place = demanded("Pascal VOC 2012", "VOCdevkit/VOC2012", how=how).parent.parent
    part = "train" if split == "training" else "val"
    samples = _read("Pascal VOC 2012", how, lambda: VOCSegmentation(place, "2012", part))
    if split != "training":
        samples = Subset(samples, range(0 if split == "validation" else 1, len(samples), 2))

    def change(sample: Any) -> Any:
        mask = sample[1].resize((VOC_SIZE, VOC_SIZE), Image.Resampling.NEAREST)
        image, classes = _tensor(sample[0], VOC_SIZE), torch.from_numpy(numpy.array(mask)).long()
        if split == "training" and torch.rand(()) < 0.5:
            image, classes = image.flip(-1), classes.flip(-1)
        return image, classes

    return Mapped(samples, change)


@functools.cache
def penn_fudan(split: str) -> Dataset[Any]:
    """Penn-Fudan's pedestrians (Wang et al., 2007): images (3, 128, 128), boxes (8, 4) of their masks, and
    classes (8,), -1 where there is no further person. Every fifth image validates, every fifth tests.
    """
    how = "unpack PennFudanPed.zip there"
    place = demanded("Penn-Fudan", "PennFudanPed/PNGImages", how=how).parent
    files = sorted((place / "PNGImages").glob("*.png"))
    if len(files) < 5:
        raise InputError(f"'{place / 'PNGImages'}' holds {len(files)} pictures; Penn-Fudan has 170")
    which = {"validation": (3,), "test": (4,), "training": (0, 1, 2)}[split]
    kept = [file for number, file in enumerate(files) if number % 5 in which]

    def change(file: Path) -> Any:
        image, boxes, labels = _pedestrians(file)
        if split == "training" and torch.rand(()) < 0.5:
            image = image.flip(-1)
            left, top, right, bottom = boxes.unbind(1)
            turned = torch.stack([PENN_FUDAN_SIZE - right, top, PENN_FUDAN_SIZE - left, bottom], 1)
            boxes = torch.where(labels[:, None] >= 0, turned, boxes)
        return image, boxes, labels

    return Mapped(kept, change)


@functools.cache
def _pedestrians(file: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """An image, its boxes and their classes, decoded once: there are few, and small ones."""
    mask = Image.open(file.parents[1] / "PedMasks" / f"{file.stem}_mask.png")
    return _tensor(Image.open(file), PENN_FUDAN_SIZE), *_people(torch.from_numpy(numpy.array(mask)).long())


def _people(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Boxes and classes of a mask (height, width) that numbers its people, scaled to the image's size."""
    boxes, labels = torch.zeros(PENN_FUDAN_MOST, 4), torch.full((PENN_FUDAN_MOST,), -1)
    height, width = mask.shape
    scale = PENN_FUDAN_SIZE / torch.tensor([width, height, width, height])
    people = torch.unique(mask[mask > 0]).tolist()
    for number, person in enumerate(people[:PENN_FUDAN_MOST]):
        rows, columns = torch.nonzero(mask == person, as_tuple=True)
        corners = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        boxes[number], labels[number] = torch.tensor(corners) * scale, 0
    return boxes, labels
