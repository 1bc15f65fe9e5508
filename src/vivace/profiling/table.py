"""A profile in the terminal."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from vivace import words
from vivace.pages.answer import ending
from vivace.profiling.answering import HEALTHY, answer
from vivace.profiling.run import Profiled
from vivace.profiling.together import known_from

if TYPE_CHECKING:
    from rich.console import Console


def draw(result: Profiled, console: Console, *, details: bool = False) -> None:
    """The answer; with `details` before it every verdict, the roofline and the memory."""
    console.print()
    if details:
        _draw_details(result.document, console)
        console.print()
    found = dataclasses.replace(answer(result.document), page=str(result.page_path))
    ending(found, console, details=details)


def _draw_details(document: dict[str, Any], console: Console) -> None:
    from rich.markup import escape

    if "law" in document:
        console.print(_ranks(document["expected"]))
        return
    faults = [(v["cause"], v) for v in document["verdicts"] if v["cause"] != HEALTHY]
    bounds = [(f"bound by {bound['name'].replace('_', ' ')}", bound) for bound in document["bounds"]]
    for title, row in faults + bounds:
        console.print(f"[bold]{title}[/bold]  {escape(row['evidence'])}")
        gain = row["gain"]
        if gain["high"] > 1.0:
            console.print(f"    gain  {words.fast_between(gain['low'], gain['high'])}", markup=False)
        console.print(f"    next  {row['next']}", markup=False)
    if document["roofline"]:
        console.print(_roofline(document["roofline"]))
    memory = document["memory"]
    parts = ("parameters", "gradients", "optimizer", "activations")
    sizes = [f"{name} {words.size(memory[name])}" for name in parts if memory.get(name)]
    peak = f"peak {words.size(memory['peak_bytes'])}: " if memory.get("peak_bytes") else ""
    console.print(f"{peak}{', '.join(sizes)}", markup=False)
    for reason in document["missing"]:
        console.print(f"missing  {reason}", markup=False)
    if document.get("paused_seconds", 0.0) >= 0.1:
        paused = words.duration(document["paused_seconds"])
        console.print(f"The script waited {paused} for experiments on copies of its step.", markup=False)


def _ranks(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("ranks", "speed", "a step", "compute", "exchange", "data"):
        table.add_column(column, justify="right")
    table.add_column("known from")
    for row in rows:
        spent = (row["seconds"][phase] for phase in ("compute", "communication", "data"))
        figures = (words.duration(seconds) for seconds in (row["step_seconds"], *spent))
        table.add_row(str(row["ranks"]), words.times(row["speedup"]), *figures, known_from(row))
    return table


def _roofline(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("operators", "time", "limit", "share", "bound by"):
        table.add_column(column, justify="left" if column in ("operators", "bound by") else "right")
    for row in rows:
        bound, share = row["bound_seconds"], row["share"]
        table.add_row(
            row["operator"],
            words.duration(row["seconds"]) if row["seconds"] else "not seen",
            words.duration(bound) if bound is not None else "",
            words.percent(share) if share is not None else "",
            row["bound_by"],
        )
    return table
