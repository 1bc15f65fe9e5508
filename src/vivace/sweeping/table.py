"""A sweep's trials in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from vivace import words
from vivace.sweeping.answering import cost_told
from vivace.sweeping.result import Swept
from vivace.sweeping.space import told

if TYPE_CHECKING:
    from rich.console import Console


def draw(found: Swept, console: Console) -> None:
    """Every trial, the best first."""
    table = Table(box=None, pad_edge=False)
    weighed = found.objectives[1:]
    for name in ("trial", found.metric_title, *weighed, "epochs", "took", "ended", "with"):
        folded = name == "with"
        table.add_column(Text(name), no_wrap=not folded, overflow="fold" if folded else "ellipsis")
    order = sorted(found.trials, key=lambda t: (t.metric is None, -(t.metric or 0.0)))
    for trial in order:
        cells = (
            str(trial.number),
            words.number(trial.metric),
            *(cost_told(name, trial.costs.get(name)) for name in weighed),
            str(len(trial.curve)),
            words.duration(trial.seconds),
            trial.state,
            told(trial.parameters) + (f": {trial.reason}" if trial.reason else ""),
        )
        table.add_row(*map(Text, cells))
    console.print(table)
