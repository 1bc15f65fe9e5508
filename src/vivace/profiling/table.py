"""A profile in the terminal."""

from __future__ import annotations

from typing import Any

from vivace import words
from vivace.profiling.run import Profiled


def draw(result: Profiled, console: Any) -> None:
    """Verdicts first, then where the time goes, the roofline and the memory."""
    from rich.markup import escape
    from rich.table import Table

    document = result.document
    found = [(verdict["cause"], verdict) for verdict in document["verdicts"]]
    found += [(f"bound by {bound['name'].replace('_', ' ')}", bound) for bound in document["bounds"]]
    for title, row in found:
        console.print(f"[bold]{title}[/bold]  {escape(row['evidence'])}")
        gain = row["gain"]
        if gain["high"] > 1.0:
            console.print(f"    gain  {gain['low']:.2f} to {gain['high']:.2f} times as fast", markup=False)
        console.print(f"    next  {row['next']}", markup=False)
    shares = [
        f"{name} {words.percent(share)}" for name, share in document["shares"].items() if share >= 0.005
    ]
    step = (
        f"{words.duration(document['step_seconds'])} a step, {document['samples_per_second']:.4g} samples/s"
    )
    console.print(f"\n{step}: {', '.join(shares)}", markup=False)
    table = Table(box=None, pad_edge=False)
    for column in ("operators", "time", "limit", "share", "bound by"):
        table.add_column(column, justify="left" if column in ("operators", "bound by") else "right")
    for row in document["roofline"]:
        bound, share = row["bound_seconds"], row["share"]
        table.add_row(
            row["operator"],
            words.duration(row["seconds"]) if row["seconds"] else "not seen",
            words.duration(bound) if bound is not None else "",
            words.percent(share) if share is not None else "",
            row["bound_by"],
        )
    if document["roofline"]:
        console.print(table)
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
    console.print(f"page  {result.page_path}", markup=False, soft_wrap=True)
    if document.get("replaced"):
        console.print(f"It took the place of an earlier profile, of {document['replaced']}.", markup=False)
