"""The last words of `tune`, `train` and `sweep`: the answer of their pages, of what has just been found."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vivace.command.progress import short
from vivace.pages.answer import Answer, ending
from vivace.reporting.answering import answer
from vivace.reporting.content import Content
from vivace.reporting.reading import load
from vivace.reporting.tables import details as draw_details

if TYPE_CHECKING:
    from rich.console import Console

    from vivace.live.search import Searched
    from vivace.sweeping.result import Swept
    from vivace.training.training import Run
    from vivace.tuning.result import Result


def tuned(result: Result, job: str, console: Console, *, details: bool = False, command: str = "") -> None:
    """What `tune` found, and with `details` all that its page holds; `command` is how it was started."""
    document = result.to_dict()
    document |= {key: short(document[key]) for key in ("plan_path", "report_path")}
    content = _content(
        Path(short(result.report_path)).parent,
        trials=tuple(result.trials),
        run={"job": {"name": job}, "command": command},
        result=document,
        verdict=result.verdict.to_dict() if result.verdict is not None else {},
    )
    _show(answer(content), console, load(Path(result.report_path).parent) if details else None)


def trained(
    run: Run,
    console: Console,
    *,
    details: bool = False,
    beside: Run | None = None,
    page: Path | None = None,
) -> None:
    """What `train` ended with, `beside` another training, and with `details` all that its page holds; `page`
    is that, where it is written already.
    """
    content = _content(Path(short(run.run_path)), training=run.to_dict())
    found = answer(content, None if beside is None else beside.to_dict())
    written = str(page or found.page)
    found = dataclasses.replace(found, page=short(written) if written else "")
    report = f"vivace report {shlex.quote(str(content.folder))}"
    found = dataclasses.replace(found, next=found.next or (() if page else (report,)))
    _show(found, console, load(Path(run.run_path)) if details else None)


def swept(result: Swept, console: Console, *, details: bool = False) -> None:
    """What `sweep` found, and with `details` every trial."""
    from vivace.sweeping.answering import answer as answer_of
    from vivace.sweeping.table import draw

    if details:
        console.print()
        draw(result, console)
    found = answer_of(result)
    console.print()
    ending(dataclasses.replace(found, page=short(found.page)), console, details=details)


def searched(
    result: Searched, command: str, folder: Path, console: Console, *, details: bool = False
) -> None:
    """What `tune` found on a script's own steps, and with `details` all that its page holds."""
    from vivace.command.options import draw_rows
    from vivace.ledger import Ledger
    from vivace.live import answering
    from vivace.live.errand import LEDGER

    sections = answering.details(result.document, Ledger(folder / LEDGER).read()) if details else []
    console.print()
    for title, rows in sections:
        console.print(f"{title}:", markup=False, highlight=False)
        draw_rows((), [list(row) for row in rows], console)
        console.print()
    found = answering.searched(result.document, command)
    found = dataclasses.replace(found, page=short(found.page) if found.page else "")
    ending(found, console, details=details)


def _content(folder: Path, **known: object) -> Content:
    empty: dict[str, Any] = {"trials": (), "metrics": (), "run": {}, "profile": {}, "result": {}}
    return Content(folder=folder, **(empty | {"verdict": {}, "training": {}} | known))


def _show(found: Answer, console: Console, behind: Content | None) -> None:
    console.print()
    if behind is not None:
        draw_details(behind, console)
        console.print()
    ending(found, console, details=behind is not None)
