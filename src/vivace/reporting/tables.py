"""The report in the terminal: the page's content as calm tables that fit 80 columns."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from vivace import words
from vivace.errors import printable
from vivace.events import metric_title
from vivace.pages.answer import ending
from vivace.pages.sameness import plain
from vivace.reporting import memory, phrases
from vivace.reporting.answering import answer
from vivace.reporting.content import Content
from vivace.reporting.course import course
from vivace.reporting.page import loaded
from vivace.reporting.reading import page_of_another


def terminal(
    folder: str | os.PathLike[str], console: Console, beside: str | os.PathLike[str] | None = None
) -> None:
    """Print a run's report to `console`; `beside` and the errors are those of `report`."""
    written = page_of_another(Path(folder)) if beside is None else None
    console.print()
    if written is not None:
        console.print(
            f"This is the folder of vivace {written[1]}, whose page holds all of it.", highlight=False
        )
        return
    content, other = loaded(folder, beside)
    shown = answer(content, None if other is None else other.training)
    if other is not None:
        reached = course(content).against(course(other), metric_title(content.training))
        shown = dataclasses.replace(shown, notes=(*shown.notes, reached))
    ending(dataclasses.replace(shown, page=""), console)
    details(content, console)


def details(content: Content, console: Console) -> None:
    """All that lies behind an answer, as tables."""
    tables = (
        _facts(content),
        _plan(content),
        _baselines(content),
        _waterfall(content),
        _trials(content),
        _not_measured(content),
        _predictions(content),
        _checks(content),
        _memory(content),
        _batches(content),
        _setting(content),
    )
    for table in tables:
        if table.row_count:
            console.print()
            console.print(Padding(table, (0, 0, 0, 2)))
    for said in (memory.sentence(content), memory.advice(content)):
        if said:
            console.print("\n", _text(said), sep="")
    if content.tuned and not content.verdict:
        console.print(Text("\nNot verified: the run holds no verdict."))
    elif content.verdict.get("reason"):
        console.print("\n", _text(str(content.verdict["reason"])), sep="")
    if content.run.get("command"):
        console.print("\n", _text(f"Again: {content.run['command']}", "dim"), sep="")


def _table(title: str, *columns: str, numbers: int = 0) -> Table:
    """A quiet table whose last `numbers` columns are set flush right."""
    table = Table(title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.show_header = any(columns)
    for index, column in enumerate(columns):
        flush = index >= len(columns) - numbers
        table.add_column(
            Text(column, style="dim"), justify="right" if flush else "left", no_wrap=flush, overflow="fold"
        )
    return table


def _fill(table: Table, *rows: tuple[str, ...]) -> Table:
    """Add rows as plain text: nothing in a run's files is read as markup."""
    for row in rows:
        table.add_row(*map(_text, row))
    return table


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style)


def _facts(content: Content) -> Table:
    return _fill(Table.grid(padding=(0, 2)), *((value, name) for name, value in answer(content).facts))


def _plan(content: Content) -> Table:
    evidence = content.final.evidence if content.final else {}
    rows = ((_named(n, phrases.setting(s)), evidence.get(n, words.UNKNOWN)) for n, s in content.plan.items())
    return _fill(_table("The plan", "technique", "took effect"), *rows)


def _named(name: str, settings: str) -> str:
    return f"{name} ({settings})" if settings else name


def _baselines(content: Content) -> Table:
    rows = ((bar.name, bar.note, words.number(bar.value)) for bar in content.baselines)
    return _fill(_table("Three baselines", "", "", "samples/s", numbers=1), *rows)


def _waterfall(content: Content) -> Table:
    table = _table("Where the gain comes from", "cumulative", "speed", "adds", numbers=2)
    return _fill(
        table,
        *(
            (g.name, words.ratio(g.ratio), words.change(g.before, g.ratio.counts) if g.before else "")
            for g in content.waterfall
        ),
    )


def _trials(content: Content) -> Table:
    table = _table("Trials", "trial", "speed", "peak", "warm-up", "pays after", numbers=4)
    for row in content.measured:
        cells = (
            f"{row.name} (confirmed)" if row.trial.role == "confirmation" else row.name,
            words.ratio(row.ratio),
            words.size(row.trial.peak_bytes),
            words.duration(row.trial.warmup_seconds),
            phrases.steps(row.break_even).removesuffix(" steps"),
        )
        _fill(table, cells)
    return table


def _not_measured(content: Content) -> Table:
    rows = ((", ".join(names), *why) for names, *why in content.not_measured)
    return _fill(_table("Refused and failed", "technique", "outcome", "reason"), *rows)


def _predictions(content: Content) -> Table:
    held = sum(prediction.held for prediction in content.predictions)
    title = f"Predicted and measured: {held} of {len(content.predictions)} inside"
    rows = (
        (p.name, words.interval(p.low, p.high), words.speed(p.ratio), "yes" if p.held else "no")
        for p in content.predictions
    )
    return _fill(_table(title, "trial", "predicted", "measured", "inside", numbers=3), *rows)


def _checks(content: Content) -> Table:
    rows = (
        (
            plain(str(check.get("name"))),
            *(words.number(check.get(key)) for key in ("score", "limit", "value", "envelope")),
            "not judged" if check.get("kept") is None else "yes" if check["kept"] else "NO",
        )
        for check in content.checks
    )
    columns = ("check", "envelopes", "allowed", "value", "envelope", "kept")
    return _fill(_table("Is it the same model?", *columns, numbers=5), *rows)


def _memory(content: Content) -> Table:
    rows = ((bar.name, words.size(bar.value)) for bar in content.memory)
    return _fill(_table("Memory", "", "", numbers=1), *rows)


def _batches(content: Content) -> Table:
    table = _table("Batch", "samples at once", "", "samples/s", "against yours", "peak", numbers=3)
    rows = (
        (str(s.samples), s.reason, words.number(s.speed), words.ratio(s.ratio), words.size(s.peak_bytes))
        for s in memory.sizes(content)
    )
    return _fill(table, *rows)


def _setting(content: Content) -> Table:
    return _fill(_table("Job and machine", "", ""), *content.setting)
