"""A compression in the terminal."""

from __future__ import annotations

from typing import Any

from vivace import words
from vivace.compressing.answering import answer, in_order
from vivace.compressing.result import Compressed
from vivace.pages.answer import ending


def draw(found: Compressed, console: Any, *, details: bool = False) -> None:
    """Print the answer, and with `details` every form before it."""
    console.print()
    if details:
        _draw_forms(found, console)
        console.print()
    ending(answer(found), console)


def _draw_forms(found: Compressed, console: Any) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("form", "speed", "p50", "p99", "size", "memory", found.subject["metric_name"], "answer"):
        table.add_column(column)
    missing = [one for one in found.tried if one.status == "missing"]
    for one in (found.reference, *in_order(found), *missing):
        value = one.change["value"] if one.change else None
        table.add_row(
            one.name,
            words.ratio(one.ratio),
            words.duration(one.p50),
            words.duration(one.p99),
            words.size(one.bytes),
            words.size(one.peak_bytes),
            words.number(value),
            f"{one.status}: {one.reason}" if one.reason else one.status,
        )
    console.print(table)
