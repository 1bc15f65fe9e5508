"""What the commands share: the application, their options, and tables."""

from __future__ import annotations

from typing import Annotated, Any

import typer

HELP = """Makes a PyTorch training job faster, proves that it is still the same model, and trains it.

JOB is path/to/file.py:name, package.module:name, or the name of a built-in recipe."""

app = typer.Typer(
    help=HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
LONGEST_UNBROKEN = 24  # characters of a table's cell
JobName = Annotated[str, typer.Argument(metavar="JOB", help="file.py:name, module:name, or a recipe")]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON document on standard output")]
Quiet = Annotated[bool, typer.Option("--quiet", help="no progress, no tables")]
Address = Annotated[str | None, typer.Option(help="of the Ray cluster: auto, or HOST:PORT of its head")]
Details = Annotated[bool, typer.Option("--details", help="all that the page holds, before the answer")]
Debug = Annotated[bool, typer.Option("--debug", help="show tracebacks")]
OnDevice = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda or cuda:1; left out, the first that torch trains on")
]


def cell(value: object) -> str:
    """A value as a table shows it."""
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def draw_rows(
    columns: tuple[str, ...], rows: list[list[str]], console: Any, caption: str | None = None
) -> None:
    """Print a table; a column with long texts alone is folded, addresses in it too."""
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=None, pad_edge=False, caption=caption, caption_justify="left", show_header=bool(columns)
    )
    for place, cells in enumerate(zip(*rows, strict=True)):
        short = max(map(len, cells)) <= LONGEST_UNBROKEN
        title = columns[place] if columns else ""
        table.add_column(title, no_wrap=short, overflow="ellipsis" if short else "fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)
