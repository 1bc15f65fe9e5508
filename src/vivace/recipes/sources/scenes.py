"""Cut-out pictures on photographs: images whose boxes and masks are exact."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from PIL import Image, ImageEnhance
from torch.utils.data import Dataset

from vivace.recipes.sources import cutouts

MOST = 4  # pictures in one scene
SHARES = (0.2, 0.5)  # of the scene's side, which a picture's longer side takes
TURNED = 20.0  # degrees either way
VISIBLE = 0.5  # share of a picture that later ones may leave
OPAQUE = 128  # of 255: from here a pixel belongs to the picture
MEAN, SPREAD = 0.45, 0.27  # of a pixel's values


class Scene(NamedTuple):
    """An image (3, size, size) around zero, classes of its pixels (size, size) with 0 for the photograph,
    boxes (MOST, 4) in pixels from the left upper corner, as x1, y1, x2, y2, and their classes (MOST,), which
    are -1 where there is no further box.
    """

    image: torch.Tensor
    mask: torch.Tensor
    boxes: torch.Tensor
    labels: torch.Tensor


def background(split: str, size: int, draw: random.Random) -> Image.Image:
    """A square piece of a photograph, mirrored as it falls."""
    photograph = draw.choice(cutouts.photographs(split))
    side = draw.randint(min(size, *photograph.size), min(2 * size, *photograph.size))
    left, top = draw.randint(0, photograph.width - side), draw.randint(0, photograph.height - side)
    piece = photograph.resize((size, size), Image.Resampling.BILINEAR, (left, top, left + side, top + side))
    return piece.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if draw.random() < 0.5 else piece


def varied(picture: Image.Image, longest: int, draw: random.Random) -> Image.Image:
    """A picture of another size, a little turned, mirrored as it falls, lighter or darker."""
    share = longest / max(picture.size)
    shape = (max(1, round(picture.width * share)), max(1, round(picture.height * share)))
    picture = picture.resize(shape, Image.Resampling.BILINEAR)
    if draw.random() < 0.5:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    picture = picture.rotate(draw.uniform(-TURNED, TURNED), Image.Resampling.BILINEAR, expand=True)
    alpha = picture.getchannel("A")
    picture = ImageEnhance.Brightness(picture.convert("RGB")).enhance(draw.uniform(0.7, 1.2))
    picture.putalpha(alpha)
    return picture.crop(bounds(numpy.asarray(alpha) >= OPAQUE) or (0, 0, 1, 1))


def bounds(inside: NDArray[numpy.bool_]) -> tuple[int, int, int, int] | None:
    """The box (x1, y1, x2, y2) of where it is true, (height, width); None where it is nowhere."""
    columns, rows = (numpy.flatnonzero(inside.any(axis)) for axis in (0, 1))
    return (int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1) if len(rows) else None


def scene(
    split: str,
    size: int,
    draw: random.Random,
    number: int | None = None,
    shares: tuple[float, float] = SHARES,
) -> Scene:
    """One scene as `draw` has it, of `number` pictures or of one to `MOST`, `shares` of its side large."""
    image = background(split, size, draw)
    owners = numpy.zeros((size, size), numpy.int64)
    sizes, classes = [], []
    by_class = cutouts.pictures(split)
    for owner in range(1, (number or draw.randint(1, MOST)) + 1):
        label = draw.randrange(len(by_class))
        longest = round(size * draw.uniform(*shares))
        picture = varied(draw.choice(by_class[label]), longest, draw)
        left = draw.randint(0, max(0, size - picture.width))
        top = draw.randint(0, max(0, size - picture.height))
        image.paste(picture, (left, top), picture)
        inside = numpy.asarray(picture.getchannel("A"))[: size - top, : size - left] >= OPAQUE
        owners[top : top + inside.shape[0], left : left + inside.shape[1]][inside] = owner
        sizes.append(int(inside.sum()))
        classes.append(label)
    return _described(image, owners, sizes, classes)


def _described(image: Image.Image, owners: numpy.ndarray, sizes: list[int], classes: list[int]) -> Scene:
    pixels = torch.from_numpy(numpy.array(image)).permute(2, 0, 1).float() / 255
    boxes, labels = torch.zeros(MOST, 4), torch.full((MOST,), -1)
    mask = torch.tensor([0, *(label + 1 for label in classes)])[torch.from_numpy(owners)]
    place = 0
    for owner, (num_pixels, label) in enumerate(zip(sizes, classes, strict=True), 1):
        inside = owners == owner
        box = bounds(inside)
        if box is not None and numpy.count_nonzero(inside) >= VISIBLE * num_pixels:
            boxes[place], labels[place] = torch.tensor(box), label
            place += 1
    return Scene((pixels - MEAN) / SPREAD, mask, boxes, labels)


class Scenes(Dataset[Any]):
    """What `row` takes of scenes of one split: other ones in each epoch of training, else always the same."""

    def __init__(
        self,
        split: str,
        length: int,
        size: int,
        row: Callable[[Scene], Any],
        number: int | None = None,
        shares: tuple[float, float] = SHARES,
    ) -> None:
        self.split, self.length, self.size, self.number, self.shares = split, length, size, number, shares
        self.row = row
        self.made: dict[int, Scene] = {}

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if self.split == "training":
            return self.row(self._scene(int(torch.randint(2**31, ()))))
        if index not in self.made:
            self.made[index] = self._scene(index)
        return self.row(self.made[index])

    def _scene(self, number: int) -> Scene:
        return scene(self.split, self.size, random.Random(f"{self.split} {number}"), self.number, self.shares)
