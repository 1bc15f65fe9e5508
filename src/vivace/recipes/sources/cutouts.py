"""Pictures with exact outlines: those of the Noto Color Emoji font, in five classes, and the photographs that
scikit-image and scikit-learn ship to paste them on.

Pictures and photographs that validate or test never train; pictures that look nearly the same are on one
side together.
"""

from __future__ import annotations

import functools
import hashlib
import random
from pathlib import Path

import numpy

from vivace.errors import InputError
from vivace.recipes.sources import given, needing, of_package

with needing():
    from PIL import Image, ImageDraw, ImageFont

FONT = "NotoColorEmoji.ttf"
FONT_FOLDERS = ("/usr/share/fonts", "/usr/local/share/fonts", "~/.local/share/fonts", "~/.fonts")
FONT_SIZE, WIDTH, HEIGHT = 109, 136, 128  # pixels: the only size that the font has
SIDE = 64  # pixels of a picture's longer side, as it is kept

# Code points of Unicode, first and last of each range.
CLASSES: dict[str, tuple[tuple[int, int], ...]] = {
    "face": (
        (0x1F600, 0x1F637),
        (0x1F641, 0x1F644),
        (0x1F910, 0x1F915),
        (0x1F920, 0x1F92F),
        (0x1F970, 0x1F976),
        (0x1F978, 0x1F97A),
        (0x1F9D0, 0x1F9D0),
        (0x1FAE0, 0x1FAE5),
    ),
    "animal": (
        (0x1F400, 0x1F43D),
        (0x1F54A, 0x1F54A),
        (0x1F577, 0x1F577),
        (0x1F980, 0x1F99F),
        (0x1F9A1, 0x1F9A9),
        (0x1F9AB, 0x1F9AE),
        (0x1FAB0, 0x1FAB3),
    ),
    "food": (
        (0x1F32D, 0x1F330),
        (0x1F344, 0x1F373),
        (0x1F375, 0x1F37B),
        (0x1F37E, 0x1F37F),
        (0x1F950, 0x1F961),
        (0x1F964, 0x1F96F),
        (0x1F9C0, 0x1F9C9),
        (0x1FAD0, 0x1FAD6),
    ),
    "vehicle": (
        (0x1F680, 0x1F688),
        (0x1F68A, 0x1F68E),
        (0x1F690, 0x1F6A4),
        (0x1F6B2, 0x1F6B2),
        (0x1F6E5, 0x1F6E5),
        (0x1F6E9, 0x1F6EC),
        (0x1F6F3, 0x1F6FC),
        (0x1F3CD, 0x1F3CE),
        (0x26F4, 0x26F5),
    ),
    "building": (
        (0x1F3D7, 0x1F3DB),
        (0x1F3DF, 0x1F3E6),
        (0x1F3E8, 0x1F3ED),
        (0x1F3EF, 0x1F3F0),
        (0x1F54B, 0x1F54D),
        (0x26E9, 0x26EA),
        (0x1F5FC, 0x1F5FC),
        (0x1F492, 0x1F492),
        (0x1F6D5, 0x1F6D6),
    ),
}
NAMES = tuple(CLASSES)
SPLITS = ("training", "validation", "test")
SHARES = (0.7, 0.85, 1.0)  # of the families of pictures, where each split ends
NEARLY_THE_SAME = 0.02  # mean difference of two thumbnails, whose values lie between 0 and 1
PHOTOGRAPHS = {
    "training": (
        "brick",
        "grass",
        "camera",
        "coins",
        "astronaut",
        "coffee",
        "rocket",
        "page",
        "cell",
        "china.jpg",
    ),
    "validation": ("gravel", "cat", "immunohistochemistry", "moon"),
    "test": ("clock", "hubble_deep_field", "retina", "flower.jpg"),
}


def font_file() -> Path:
    """The font. Raises InputError with the install line where it is missing."""
    found = given(FONT)
    folders = [Path(folder).expanduser() for folder in FONT_FOLDERS]
    paths = [found] if found else [path for folder in folders for path in folder.rglob(FONT)]
    if not paths:
        raise InputError(
            f"this recipe reads the font {FONT}: apt install fonts-noto-color-emoji, or put it below "
            "the folder that VIVACE_DATA names"
        )
    return paths[0]


def drawn(font: ImageFont.FreeTypeFont, code_point: int) -> Image.Image:
    """The picture of a code point, with alpha."""
    picture = Image.new("RGBA", (WIDTH, HEIGHT))
    ImageDraw.Draw(picture).text((0, 0), chr(code_point), font=font, embedded_color=True)
    return picture


@functools.cache
def every() -> dict[str, list[Image.Image]]:
    """The pictures of each class, cut to their outlines, `SIDE` pixels at most; each picture once."""
    try:
        font = ImageFont.truetype(font_file(), FONT_SIZE)
    except OSError as error:
        found_at = f"'{font_file()}' is no font with pictures of {FONT_SIZE} pixels"
        raise InputError(f"{found_at}: {error}") from error
    seen = {hashlib.sha256(drawn(font, 0xF0000).tobytes()).digest()}  # what stands for a missing picture
    found: dict[str, list[Image.Image]] = {}
    for name, ranges in CLASSES.items():
        found[name] = []
        for code_point in (point for first, last in ranges for point in range(first, last + 1)):
            picture = drawn(font, code_point)
            key = hashlib.sha256(picture.tobytes()).digest()
            if key not in seen and picture.getbbox():
                seen.add(key)
                picture = picture.crop(picture.getbbox())
                picture.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
                found[name].append(picture)
    return found


def families(pictures: list[Image.Image]) -> list[list[int]]:
    """Which pictures look nearly the same: one that is like some of several families joins them."""
    thumbnails = [numpy.asarray(p.resize((16, 16)).convert("RGBa"), numpy.float32) / 255 for p in pictures]
    small = numpy.stack(thumbnails).reshape(len(pictures), -1)
    found: list[list[int]] = []
    for number, thumbnail in enumerate(small):
        alike = abs(small[:number] - thumbnail).mean(1) < NEARLY_THE_SAME
        first, *others = [family for family in found if alike[family].any()] or [[]]
        if not first:
            found.append(first)
        first.append(number)
        for other in others:
            found.remove(other)
            first += other
    return found


@functools.cache
def pictures(split: str) -> tuple[tuple[Image.Image, ...], ...]:
    """The pictures of each class of one split."""
    place = SPLITS.index(split)
    first, last = (0.0, *SHARES)[place], SHARES[place]
    found = []
    for all_of_class in every().values():
        grouped = families(all_of_class)
        random.Random(0).shuffle(grouped)
        mine = grouped[round(first * len(grouped)) : round(last * len(grouped))]
        found.append(tuple(all_of_class[number] for family in mine for number in family))
    return tuple(found)


@functools.cache
def photographs(split: str) -> tuple[Image.Image, ...]:
    """The photographs of one split, in colour, at half their size where they are large."""
    with needing():
        from skimage import data as shipped
    found = []
    for name in PHOTOGRAPHS[split]:
        if name.endswith(".jpg"):
            picture: Image.Image = Image.open(of_package("scikit-learn", f"sklearn/datasets/images/{name}"))
        else:
            picture = Image.fromarray(getattr(shipped, name)())
        picture = picture.convert("RGB")
        found.append(picture.reduce(2) if min(picture.size) >= 400 else picture)
    return tuple(found)
