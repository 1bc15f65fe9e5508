"""What a trained model makes of data, to look at: confused classes, images with boxes, texts with marks.

A Job's `pictures` returns them by heading; `train` keeps them as ``pictures.json``, and the page of the run
draws them. They are data, never markup: nothing that a picture says can act on the page. Imports no torch.
"""

from __future__ import annotations

import base64
import dataclasses
import math
import operator
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vivace.errors import JobError

if TYPE_CHECKING:
    import numpy
    from numpy.typing import ArrayLike, NDArray

PICTURES = "pictures.json"  # in the run's folder
MOST_PICTURES = 60  # of a run
MOST_CLASSES = 40
MOST_PIXELS = 512  # of an image's longer side, as it is kept
MOST_LETTERS = 2000  # of a text
MOST_BOXES = 100  # of an image
SIDES = ("left", "top", "right", "bottom")


@dataclasses.dataclass(frozen=True)
class Counts:
    """How often samples of each class, a row, were taken for each class, a column: a confusion matrix.

    Raises JobError where there is not one row and one column of whole numbers for each name.
    """

    title: str
    names: Sequence[str]
    counts: Sequence[Sequence[int]]

    def __post_init__(self) -> None:
        names = tuple(str(name) for name in self.names)
        try:
            counts = tuple(tuple(map(operator.index, row)) for row in self.counts)
        except TypeError as error:
            raise JobError(
                f"Counts are rows of whole numbers; those of '{self.title}' are not: {error}"
            ) from None
        size, lengths = len(names), [len(row) for row in counts]
        if not 1 <= size <= MOST_CLASSES or lengths != [size] * size or min(map(min, counts)) < 0:
            raise JobError(
                f"Counts of {size} names are {size} rows of {size} numbers from 0 on, at most {MOST_CLASSES} "
                f"names; '{self.title}' has rows of {lengths}"
            )
        object.__setattr__(self, "title", str(self.title))
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "counts", counts)


@dataclasses.dataclass(frozen=True)
class Box:
    """A rectangle in pixels from the left upper corner; one whose sides are not finite is not kept. `correct`
    is None for the true box, else whether the model's is right.
    """

    left: float
    top: float
    right: float
    bottom: float
    label: str = ""
    correct: bool | None = None

    def __post_init__(self) -> None:
        for side in SIDES:
            object.__setattr__(self, side, float(getattr(self, side)))
        object.__setattr__(self, "label", str(self.label))
        object.__setattr__(self, "correct", None if self.correct is None else bool(self.correct))


@dataclasses.dataclass(frozen=True)
class Pixels:
    """An image's pixels, row by row, three bytes each: what `Image` makes of an array."""

    height: int
    width: int
    data: bytes

    @property
    def array(self) -> NDArray[numpy.uint8]:
        """(height, width, 3) of uint8."""
        import numpy  # only here: a page is made without it

        return numpy.frombuffer(self.data, numpy.uint8).reshape(self.height, self.width, 3)


@dataclasses.dataclass(frozen=True)
class Image:
    """An image (height, width), (height, width, 3) or, of which the fourth channel is left out, (height,
    width, 4): whole numbers from 0 to 255, or others from 0 to 1. `boxes` are drawn on it. `legend` says what
    its colours mean: red, green and blue from 0 to 255, by name.

    Of one longer than `MOST_PIXELS` every second, third, ... pixel is kept. Raises JobError where it is none.
    """

    title: str
    pixels: ArrayLike | Pixels
    boxes: Sequence[Box] = ()
    legend: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "title", str(self.title))
        object.__setattr__(self, "boxes", tuple(self.boxes)[:MOST_BOXES])
        legend = {str(name): tuple(colour) for name, colour in self.legend.items()}
        if any(
            len(colour) != 3 or not all(part in range(256) for part in colour) for colour in legend.values()
        ):
            raise JobError(f"the legend of '{self.title}' has colours of three whole numbers from 0 to 255")
        legend = {name: tuple(map(int, colour)) for name, colour in legend.items()}
        object.__setattr__(self, "legend", dict(list(legend.items())[:MOST_CLASSES]))
        if not isinstance(self.pixels, Pixels):
            object.__setattr__(self, "pixels", _packed(self.title, self.pixels))

    @property
    def packed(self) -> Pixels:
        """The pixels as they are kept."""
        assert isinstance(self.pixels, Pixels)
        return self.pixels


def _packed(title: str, pixels: ArrayLike) -> Pixels:
    import numpy

    given = numpy.asarray(pixels)
    if given.ndim not in (2, 3) or not given.size or (given.ndim == 3 and given.shape[2] not in (1, 3, 4)):
        raise JobError(
            "an Image has pixels (height, width) or (height, width, 3), with the channels last; those of "
            f"'{title}' are of the shape {given.shape}"
        )
    if given.dtype != numpy.uint8:
        most = 255 if given.dtype.kind in "iu" else 1
        given = numpy.nan_to_num(given.astype(numpy.float64)).clip(0, most) * (255 / most)
        given = given.round().astype(numpy.uint8)
    colours = given[:, :, :3] if given.ndim == 3 else given[:, :, None]
    height, width = colours.shape[:2]
    return Pixels(height, width, numpy.broadcast_to(colours, (height, width, 3)).tobytes())


@dataclasses.dataclass(frozen=True)
class Piece:
    """Some letters of a text. With a `label` they are marked: `correct` is None for what is true and was not
    found, or for what was given; else whether the model is right.
    """

    text: str
    label: str = ""
    correct: bool | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", str(self.text))
        object.__setattr__(self, "label", str(self.label))
        object.__setattr__(self, "correct", None if self.correct is None else bool(self.correct))


@dataclasses.dataclass(frozen=True)
class Text:
    """A text in pieces, some of them marked; what is longer than `MOST_LETTERS` is cut."""

    title: str
    pieces: Sequence[Piece | str]

    def __post_init__(self) -> None:
        pieces, room = [], MOST_LETTERS
        for piece in self.pieces:
            whole = piece if isinstance(piece, Piece) else Piece(str(piece))
            text = whole.text if len(whole.text) <= room else whole.text[:room] + "\N{HORIZONTAL ELLIPSIS}"
            pieces += [dataclasses.replace(whole, text=text)] if room > 0 else []
            room -= len(whole.text)
        object.__setattr__(self, "title", str(self.title))
        object.__setattr__(self, "pieces", tuple(pieces))


Picture = Counts | Image | Text


def document(found: object) -> dict[str, Any]:
    """What ``pictures.json`` holds. Raises JobError where `found` is not lists of pictures by heading."""
    if not isinstance(found, Mapping):
        raise JobError(
            f"the Job's pictures returned a {type(found).__name__}; it must return a dictionary of headings, "
            "each with a list of vivace.pictures' Counts, Image or Text"
        )
    headings, count = [], 0
    for heading, pictures in found.items():
        if not isinstance(pictures, list | tuple):
            kind = type(pictures).__name__
            raise JobError(f"the Job's pictures under '{heading}' are a {kind}; they must be a list")
        strangers = [one for one in pictures if not isinstance(one, Counts | Image | Text)]
        if strangers:
            kind = type(strangers[0]).__name__
            raise JobError(
                f"the Job's pictures under '{heading}' hold a {kind}: neither Counts, Image nor Text"
            )
        headings.append({"heading": str(heading), "pictures": [_written(one) for one in pictures]})
        count += len(headings[-1]["pictures"])
    if count > MOST_PICTURES:
        raise JobError(f"the Job's pictures are {count}; a page shows {MOST_PICTURES} at most")
    return {"format": 1, "headings": headings}


def _written(one: Picture) -> dict[str, Any]:
    if not isinstance(one, Image):
        kind = "counts" if isinstance(one, Counts) else "text"
        return {"kind": kind, **dataclasses.asdict(one)}
    every = math.ceil(max(one.packed.height, one.packed.width) / MOST_PIXELS)
    kept = one.packed if every == 1 else Image("", one.packed.array[::every, ::every]).packed
    boxes = [
        {**dataclasses.asdict(box), **{side: getattr(box, side) / every for side in SIDES}}
        for box in one.boxes
        if all(math.isfinite(getattr(box, side)) for side in SIDES)
    ]
    packed = base64.b64encode(zlib.compress(kept.data, 9)).decode()
    return {
        "kind": "image",
        "title": one.title,
        "shape": (kept.height, kept.width),
        "pixels": packed,
        "boxes": boxes,
        "legend": one.legend,
    }


def read(found: Mapping[str, Any]) -> dict[str, list[Picture]]:
    """The pictures of a document, by heading; what is damaged or not understood is left out."""
    by_heading: dict[str, list[Picture]] = {}
    for heading in _listed(found.get("headings")):
        pictures = []
        for one in _listed(heading.get("pictures")):
            try:
                pictures.append(_read(one))
            except (TypeError, ValueError, KeyError, AttributeError, OverflowError, zlib.error):
                continue
        if pictures:
            by_heading[str(heading.get("heading"))] = pictures
    return by_heading


def _listed(found: object) -> Iterator[dict[str, Any]]:
    return (one for one in (found if isinstance(found, list) else []) if isinstance(one, dict))


def _read(one: dict[str, Any]) -> Picture:
    title = str(one["title"])
    if one["kind"] == "counts":
        return Counts(title, one["names"], one["counts"])
    if one["kind"] == "text":
        return Text(title, [Piece(*_told(piece, "text", "label")) for piece in _listed(one["pieces"])])
    height, width = (int(side) for side in one["shape"])
    if one["kind"] != "image" or not (0 < height <= MOST_PIXELS and 0 < width <= MOST_PIXELS):
        raise ValueError(one["kind"])
    size = height * width * 3
    # No more than belongs there, whatever the file says.
    raw = zlib.decompressobj().decompress(base64.b64decode(one["pixels"], validate=True), size)
    if len(raw) != size:
        raise ValueError(len(raw))
    boxes = []
    for box in _listed(one["boxes"]):
        sides = [float(box[side]) for side in SIDES]
        if all(map(math.isfinite, sides)):
            left, top, right, bottom = sides
            label, correct = _told(box, "label")
            boxes.append(Box(left, top, right, bottom, label, correct))
    return Image(title, Pixels(height, width, raw), boxes, one.get("legend") or {})


def _told(found: Mapping[str, Any], *texts: str) -> tuple[Any, ...]:
    correct = found.get("correct")
    return (*(str(found[name]) for name in texts), correct if isinstance(correct, bool) else None)
