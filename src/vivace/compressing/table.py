"""A compression in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from vivace import words
from vivace.compressing.answering import answer, in_order, stayed
from vivace.compressing.result import Compressed, Tried
from vivace.events import metric_title
from vivace.pages.answer import ending

if TYPE_CHECKING:
    from rich.console import Console

Row: TypeAlias = tuple[str, ...]


def draw(found: Compressed, console: Console, *, details: bool = False) -> None:
    """Print the answer, and with `details` every form before it."""
    console.print()
    if details:
        _draw_forms(found, console)
        console.print()
        if found.beside:
            _draw_beside(found, console)
            console.print()
    ending(answer(found), console, details=details)


def _draw_forms(found: Compressed, console: Console) -> None:
    """A line of figures for each form, and below it what became of it."""
    titles = ("form", "speed", "half", "99 %", "size", metric_title(found.subject))
    missing = [one for one in found.tried if one.status == "missing"]
    forms = [found.reference, *in_order(found), *missing]
    _draw_rows(
        titles, [_figures(found, one) for one in forms], [_became(found, one) for one in forms], console
    )


def _draw_beside(found: Compressed, console: Console) -> None:
    """A line of figures for each form at each batch, and below it what it is, or why it was not timed."""
    titles = ("form", "a call", "speed", "half", "99 %", "a second")
    rows = [
        (
            one.name,
            words.number(one.batch),
            words.ratio(one.ratio),
            words.duration(one.p50),
            words.duration(one.p99),
            words.number(one.samples_per_second),
        )
        for one in found.beside
    ]
    _draw_rows(titles, rows, [one.reason or one.does for one in found.beside], console)


def _draw_rows(titles: Row, rows: Sequence[Row], below: Sequence[str], console: Console) -> None:
    """Columns under their titles, and below each row a line."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    for cells, line in zip((titles, *rows), ("", *below), strict=True):
        table = Table(box=None, pad_edge=False, show_header=False)
        for width in widths:
            table.add_column(min_width=width, no_wrap=True)
        table.add_row(*(Text(cell, "" if line else "bold") for cell in cells))
        console.print(table)
        if line:
            console.print(Padding(Text(line, "dim"), (0, 0, 0, 4)))


def _figures(found: Compressed, one: Tried) -> Row:
    value = one.change["value"] if one.change else None
    if one is found.reference:
        value = found.subject["metric"]
    return (
        one.name,
        words.ratio(one.ratio),
        words.duration(one.p50),
        words.duration(one.p99),
        words.size(one.bytes),
        words.number(value),
    )


def _became(found: Compressed, one: Tried) -> str:
    became = "as it is" if one is found.reference else one.status
    told = f"{became}: {one.reason}" if one.reason else became
    memory = f"; memory {words.size(one.peak_bytes)}" if one.peak_bytes else ""
    return "; ".join([f"{told}{memory}", one.does, *stayed(one)])
