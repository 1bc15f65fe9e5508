"""What a command found: the first screen of its page, and its ending in the terminal, in the same order."""

from __future__ import annotations

import dataclasses
import shutil
import textwrap
from typing import TYPE_CHECKING, Literal

from vivace.errors import printable

if TYPE_CHECKING:
    from rich.console import Console

MOST_LINES = 12  # of an ending
MOST_PARTS = 8  # of a plan on the first screen, beside
MOST_NOTES = 3  # of which each more takes a part's place
_STYLES = {"good": "bold", "plain": "bold", "open": "bold yellow", "bad": "bold red"}
_ASCII = str.maketrans(
    {
        "\N{MULTIPLICATION SIGN}": "x",
        "\N{EN DASH}": "-",
        "\N{MINUS SIGN}": "-",
        "\N{RIGHTWARDS ARROW}": "->",
    }
)


@dataclasses.dataclass(frozen=True)
class Answer:
    """The gain, whether it is the same model, what the plan does, and the next command.

    `figure` is what stands large, in the person's unit, and `sentence` what it is of, without full stops.
    `tone` is ``bad`` for a broken promise, ``open`` where nothing is decided. `same` is the line on the
    model, `same_kept` its answer. `parts` are names with plain words: what the plan does, or the causes that
    were found. `notes` are sentences that the person should know, `facts` figures for the page alone.
    """

    command: str
    subject: str
    sentence: str
    figure: str = ""
    tone: Literal["good", "plain", "open", "bad"] = "good"
    same: str = ""
    same_kept: bool | None = None
    title_of_parts: str = "What the plan does"
    parts: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    next: tuple[str, ...] = ()
    date: str = ""
    page: str = ""

    @property
    def title(self) -> str:
        """Figure and sentence as plain text."""
        return capital(f"{self.figure} {self.sentence}".strip())


def ending(answer: Answer, console: Console, *, details: bool = False) -> None:
    """Print an answer in at most `MOST_LINES` lines of the console's width; what is longer is cut. `details`:
    all that the page holds stands above it.
    """
    width = min(console.width, shutil.get_terminal_size((80, 24)).columns)
    for line, style in _lines(answer, width, details):
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def lines(answer: Answer, width: int, *, details: bool = False) -> list[str]:
    """The same as plain text, for a stream that is a script's own."""
    return [line for line, _ in _lines(answer, width, details)]


def _lines(answer: Answer, width: int, details: bool) -> list[tuple[str, str]]:
    first = [(line, _STYLES[answer.tone]) for line in _folded(answer.title + ".", width, 3)]
    colour = {True: "green", False: "red", None: "yellow"}[answer.same_kept]
    first += [(line, colour) for line in _folded(answer.same + "." if answer.same else "", width, 2)]
    last = [(printable(line), "") for line in _last(answer, details)]
    room = MOST_LINES - len(first) - sum(-(-len(line) // width) for line, _ in last)
    least = min(len(answer.parts), 3) + bool(answer.parts)
    notes: list[str] = []
    for note in map(capital, answer.notes):
        folded = _folded(note + ".", width, 2)
        notes += folded if len(notes) + len(folded) <= room - (least if notes else 0) else []
    parts = _parts(answer, width, room - len(notes))
    return [*first, *((line, "") for line in parts), *((line, "yellow") for line in notes), *last]


def _parts(answer: Answer, width: int, room: int) -> list[str]:
    """The plan's techniques under their title: folded as far as there is room for it, the first ones before
    the others, else a line each.
    """
    if not answer.parts or room < 2:
        return []
    title = in_letters(f"{answer.title_of_parts}:")
    column = max(len(name) for name, _ in answer.parts)
    lines = [in_letters(f"  {printable(name):<{column}}  {printable(told)}") for name, told in answer.parts]
    hanging = textwrap.TextWrapper(
        width, subsequent_indent=" " * (column + 4), break_on_hyphens=False, break_long_words=False
    )
    if len(lines) >= room:
        lines = [*lines[: room - 2], f"  and {len(lines) - room + 2} more"]
    found, spare = [title], room - 1 - len(lines)
    for line in lines:
        folded = hanging.wrap(line)
        fits = len(folded) - 1 <= spare
        spare -= len(folded) - 1 if fits else 0
        found += folded if fits else [_cut(line, width)]
    return found


def _last(answer: Answer, details: bool) -> list[str]:
    here = "" if details else "  (all of it here: --details)"
    page = [f"Page: {answer.page}{here}"] if answer.page else []
    return page + [f"Next: {command}" for command in answer.next]


def capital(text: str) -> str:
    """A sentence begins with a large letter, unless with a name such as `bf16_autocast`, or of a file."""
    return text if {"_", "."} & set(text.split(" ", 1)[0]) else text[:1].upper() + text[1:]


def _folded(text: str, width: int, most: int) -> list[str]:
    """At most so many lines, between words."""
    lines = textwrap.wrap(in_letters(printable(text)), width, break_on_hyphens=False, break_long_words=False)
    return lines if len(lines) <= most else [*lines[: most - 1], _cut(" ".join(lines[most - 1 :]), width)]


def _cut(text: str, width: int) -> str:
    """One line; what is longer ends with three dots, between words where it has several."""
    if len(text) <= width:
        return text
    whole = text[: width - 3].rpartition(" ")[0].rstrip(" ,;:(")
    return (whole or text[: width - 4]) + " ..."


def in_letters(text: str) -> str:
    """The signs of ratios and intervals in letters that every terminal has: ``2.31x (2.24-2.38)``."""
    return text.translate(_ASCII)


def shown_parts(answer: Answer) -> tuple[tuple[str, str], ...]:
    """The parts that fit on the first screen beside the notes, with a word on the others."""
    parts, most = answer.parts, MOST_PARTS - max(0, len(answer.notes) - MOST_NOTES)
    if len(parts) <= most:
        return parts
    shown = max(1, most - 1)
    return (*parts[:shown], (f"and {len(parts) - shown} more", "below"))
