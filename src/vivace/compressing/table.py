"""A compression in the terminal."""

from __future__ import annotations

from typing import Any

from vivace import words
from vivace.compressing.answering import answer, in_order
from vivace.compressing.result import Compressed, Tried
from vivace.events import metric_title
from vivace.pages.answer import ending


def draw(found: Compressed, console: Any, *, details: bool = False) -> None:
    """Print the answer, and with `details` every form before it."""
    console.print()
    if details:
        _draw_forms(found, console)
        console.print()
    ending(answer(found), console)


def _draw_forms(found: Compressed, console: Any) -> None:
    """A line of figures for each form, and below it what became of it."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    titles = ("form", "speed", "half", "99 %", "size", metric_title(found.subject))
    missing = [one for one in found.tried if one.status == "missing"]
    forms = [found.reference, *in_order(found), *missing]
    rows = [_figures(found, one) for one in forms]
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    for cells, one in zip((titles, *rows), (None, *forms), strict=True):
        table = Table(box=None, pad_edge=False, show_header=False)
        for width in widths:
            table.add_column(min_width=width, no_wrap=True)
        table.add_row(*(Text(cell, "bold" if one is None else "") for cell in cells))
        console.print(table)
        if one is not None:
            console.print(Padding(Text(_became(found, one), "dim"), (0, 0, 0, 4)))


def _figures(found: Compressed, one: Tried) -> tuple[str, ...]:
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
    return f"{told}{memory}; {one.does}"
