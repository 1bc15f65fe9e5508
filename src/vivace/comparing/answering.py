"""The answer of a comparison: what its page opens with, and what the command ends with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from vivace import words
from vivace.ledger import Ratio
from vivace.pages.answer import Answer

if TYPE_CHECKING:
    from vivace.comparing.compared import Compared

COLUMNS = ("what", "before", "after", "change")
Tone = Literal["good", "plain", "open", "bad"]


def answer(found: Compared) -> Answer:
    """Is the second slower, by how much, and what else differs."""
    figure, sentence, tone = _gain(found)
    parts = [(row.name, _row(row.before, row.after, row.change)) for row in found.differences]
    return Answer(
        command="compare",
        subject=f"{found.before.path} \N{RIGHTWARDS ARROW} {found.after.path}",
        figure=figure,
        sentence=sentence,
        tone=tone,
        title_of_parts="What differs, and what was measured",
        parts=tuple(parts),
        notes=tuple(_notes(found)),
        page=found.page_path or "",
    )


def _gain(found: Compared) -> tuple[str, str, Tone]:
    ratio, allowed = found.ratio, found.max_regression
    if found.not_comparable or ratio is None:
        return "", f"Not comparable: {found.not_comparable}", "open"
    told, limit = _fast(found, ratio), words.percent(allowed)
    if found.slower:
        return "", f"A step takes {words.percent(1.0 / ratio.estimate - 1.0)} longer", "bad"
    if allowed is not None:
        return "", f"Not slower by more than {limit} beyond noise: the second is {told}", "plain"
    if found.has_interval and ratio.low <= 1.0 <= ratio.high:
        return "", f"No difference beyond noise: the second is {told}", "plain"
    return words.fast(ratio), f"is the second as the first{_bounds(found, ratio)}", "plain"


def _notes(found: Compared) -> Iterator[str]:
    if found.slower and found.ratio is not None:
        limit, told = words.percent(found.max_regression), _fast(found, found.ratio)
        yield f"Allowed are {limit}; the second is {told}"
    yield from found.notes


def _fast(found: Compared, ratio: Ratio) -> str:
    return f"{words.fast(ratio)} as the first{_bounds(found, ratio)}"


def _bounds(found: Compared, ratio: Ratio) -> str:
    return f" ({words.interval(ratio.low, ratio.high)})" if found.has_interval else ""


def _row(before: str, after: str, change: str) -> str:
    told = before if before == after else f"{before} \N{RIGHTWARDS ARROW} {after}"
    return f"{told} ({change})" if change and before != after else told


def rows(found: Compared) -> list[list[str]]:
    """Every difference as the cells of a table, under `COLUMNS`."""
    return [[row.name, row.before, row.after, row.change] for row in found.differences]
