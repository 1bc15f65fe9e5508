"""A verdict as a table for the terminal."""

from __future__ import annotations

from typing import Any

from vivace.verifying.verdict import Verdict

COLOURS = {True: "green", False: "red", None: "yellow"}


def headline(verdict: Verdict) -> str:
    """The answer in one sentence."""
    answer = {True: "kept", False: "BROKEN", None: "not judged"}[verdict.kept]
    reason = f": {verdict.reason}" if verdict.reason else ""
    return f"promise {verdict.promise.upper()} {answer}{reason}"


def draw(verdict: Verdict, console: Any) -> None:
    """Print the answer and the figures over the whole model."""
    from rich.table import Table

    console.print(headline(verdict), style=f"bold {COLOURS[verdict.kept]}")
    table = Table(box=None, pad_edge=False)
    table.add_column("check")
    for column in ("value", "envelope", "in envelopes", "limit"):
        table.add_column(column, justify="right")
    for check in verdict.checks:
        score = check.get("score")
        table.add_row(
            check["name"],
            f"{check['value']:.3g}",
            f"{check['envelope']:.3g}",
            f"{score:.2f}" if score is not None else "",
            f"{check['limit']:g}",
            style="" if check["kept"] else COLOURS[check["kept"]],
        )
    console.print(table)
    console.print(f"{verdict.num_checks} figures, {verdict.seeds} shadows, {verdict.seconds:.0f} s")
