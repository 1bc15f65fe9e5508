"""What a trained model makes of data, drawn. Everything that a picture says is text here, never markup."""

from __future__ import annotations

import base64
import struct
import unicodedata
import zlib
from collections.abc import Iterator, Mapping, Sequence

from markupsafe import Markup

from vivace import words
from vivace.pages.charts import element
from vivace.pictures import Box, Counts, Image, Picture, Piece, Text

_KEPT = "\n\t\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}"
_CLASSES = {None: "true", True: "right", False: "wrong"}


def drawn(by_heading: Mapping[str, Sequence[Picture]]) -> list[tuple[str, Markup]]:
    """Each heading with its pictures, images beside each other."""
    found = []
    for heading, pictures in by_heading.items():
        drawings = element("div", *map(_drawn, pictures), class_=f"pictures {_layout(pictures)}".strip())
        found.append((visible(heading), drawings))
    return found


def _layout(pictures: Sequence[Picture]) -> str:
    """How much room each of them wants."""
    found = [one.packed for one in pictures if isinstance(one, Image)]
    if not found:
        return "wide"
    return "broad" if any(pixels.width > 2 * pixels.height for pixels in found) else ""


def visible(text: str) -> str:
    """A text without letters that steer: control characters by their signs, and those that turn a line's
    direction or mean nothing by the sign for an unknown letter.
    """
    return "".join(map(_seen, text))


def _seen(letter: str) -> str:
    category = unicodedata.category(letter)
    if letter in _KEPT or category[0] != "C":
        return letter
    if ord(letter) < 0x20:
        return chr(0x2400 + ord(letter))
    return "\N{SYMBOL FOR DELETE}" if letter == "\x7f" else "\N{REPLACEMENT CHARACTER}"


def _drawn(one: Picture) -> Markup:
    if isinstance(one, Counts):
        return _matrix(one)
    return _image(one) if isinstance(one, Image) else _text(one)


def _matrix(one: Counts) -> Markup:
    """Rows are what is true, columns what the model says; a cell is as dark as its share of the row."""
    names = [visible(name) for name in one.names]
    head = (element("th", element("span", name), scope="col") for name in names)
    rows = []
    for place, (name, counts) in enumerate(zip(names, one.counts, strict=True)):
        whole = sum(counts) or 1
        cells = (
            element(
                "td",
                words.number(count) if count else "",
                class_="hit" if column == place else "miss",
                style=f"--share:{100 * count / whole:.0f}%",
            )
            for column, count in enumerate(counts)
        )
        right = element("td", words.percent(counts[place] / whole) if sum(counts) else "", class_="of")
        rows.append(element("tr", element("th", name, scope="row"), *cells, right))
    table = element(
        "table",
        element("thead", element("tr", element("td"), *head, element("td", "right", class_="of"))),
        element("tbody", *rows),
        class_="matrix",
    )
    title = visible(one.title)
    return element(
        "figure",
        element("figcaption", title),
        element("div", table, class_="scrolled", tabindex="0", role="region", aria_label=title),
    )


def _image(one: Image) -> Markup:
    height, width = one.packed.height, one.packed.width
    title = visible(one.title)
    address = f"data:image/png;base64,{base64.b64encode(png(one)).decode()}"
    marks = [mark for box in one.boxes for mark in _box(box, width, height)]
    picture = element("image", href=address, width=width, height=height)
    drawing = element(
        "svg", picture, *marks, viewBox=f"0 0 {width} {height}", role="img", aria_label=title or "a picture"
    )
    return element("figure", drawing, element("figcaption", title, *_legend(one)))


def _legend(one: Image) -> Iterator[Markup]:
    """What its colours mean, each beside a swatch."""
    for name, colour in one.legend.items():
        swatch = element("i", style=f"background: rgb({', '.join(map(str, colour))})")
        yield element("span", swatch, visible(name), class_="key")


def _box(box: Box, width: int, height: int) -> list[Markup]:
    """The rectangle inside of its image, and its label, which stays there too."""
    left, right = (min(max(side, 0.0), float(width)) for side in (box.left, box.right))
    top, bottom = (min(max(side, 0.0), float(height)) for side in (box.top, box.bottom))
    kind, size = _CLASSES[box.correct], max(width, height) / 14
    sides = {"x": left, "y": top, "width": max(right - left, 0.0), "height": max(bottom - top, 0.0)}
    shape = element("rect", class_=kind, **{name: f"{value:.1f}" for name, value in sides.items()})
    if not box.label:
        return [shape]
    far = left > width / 2
    place = {"x": f"{right if far else left:.1f}", "text_anchor": "end" if far else "start"}
    # What the model says stands above its box, what is true below.
    level = bottom + size if box.correct is None else top - 0.25 * size
    level = min(max(level, size), height - 0.25 * size)
    return [shape, element("text", visible(box.label), y=f"{level:.1f}", font_size=f"{size:.1f}", **place)]


def _text(one: Text) -> Markup:
    pieces = (_piece(piece) for piece in one.pieces if isinstance(piece, Piece))
    title = [element("figcaption", visible(one.title))] if one.title else []
    return element("figure", *title, element("p", *pieces), class_="text")


def _piece(piece: Piece) -> Markup | str:
    text = visible(piece.text)
    if not piece.label:
        return text
    return element("mark", text, " ", element("small", visible(piece.label)), class_=_CLASSES[piece.correct])


def png(one: Image) -> bytes:
    """The pixels as a PNG file (W3C's third edition): eight bits of each of three colours."""
    height, width, data = one.packed.height, one.packed.width, one.packed.data
    length = 3 * width
    # Each row begins with its filter: none.
    rows = b"".join(b"\0" + data[start : start + length] for start in range(0, len(data), length))
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows, 9)),
        (b"IEND", b""),
    )
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
