"""What `vivace.compare` returns, and the answer that its page opens with and the command ends with."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Literal

from vivace import words
from vivace.comparing.sides import Side
from vivace.errors import AnswerIsNo
from vivace.ledger import Ratio
from vivace.pages.answer import Answer

COLUMNS = ("what", "before", "after", "change")
SAME_BATCH = 0.02  # by how much the samples of a step may differ: the last batch of an epoch is often smaller
Tone = Literal["good", "plain", "open", "bad"]


@dataclasses.dataclass(frozen=True)
class Difference:
    """One thing that both sides hold, as it is told; `change` is empty where nothing is to be said."""

    name: str
    before: str
    after: str
    change: str = ""


@dataclasses.dataclass(frozen=True)
class Compared:
    """What differs between two sides, and whether the second is slower.

    `ratio` is how many times faster the second is, in time a sample (a step, where no one counted samples),
    with a 95 % interval where the files hold the times of single steps (`has_interval`). `not_comparable`
    says why speeds cannot be compared, and is empty where they can. `max_regression` is the share by which
    that time may be longer, None where nothing was asked; `slower` is then the answer, None where there is
    none.
    """

    before: Side
    after: Side
    differences: tuple[Difference, ...]
    ratio: Ratio | None
    has_interval: bool
    not_comparable: str = ""
    notes: tuple[str, ...] = ()
    max_regression: float | None = None
    page_path: str | None = None

    @property
    def slower(self) -> bool | None:
        """Is the second slower by more than `max_regression`, beyond noise?"""
        if self.max_regression is None or self.ratio is None or self.not_comparable:
            return None
        return self.ratio.high < 1.0 / (1.0 + self.max_regression)

    @property
    def unit(self) -> Literal["step", "sample"]:
        """What `ratio` is of: a sample, where those of a step are not as many on both sides, or not known."""
        sizes = self.before.step_samples, self.after.step_samples
        if self.before.sample_seconds is None or self.after.sample_seconds is None:
            return "step"
        if sizes[0] is None or sizes[1] is None:
            return "sample"
        return "step" if math.isclose(sizes[0], sizes[1], rel_tol=SAME_BATCH) else "sample"

    @property
    def exit_code(self) -> int:
        """0; 1 where it is slower by more than was allowed, or where that was asked and cannot be told."""
        fine = self.max_regression is None or self.slower is False
        return 0 if fine else AnswerIsNo.exit_code

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from vivace.pages.render import card  # only then: a template engine

        return card(answer(self))

    def to_dict(self) -> dict[str, Any]:
        """The document that ``vivace compare --json`` prints."""
        return {
            "slower": self.slower,
            "max_regression": self.max_regression,
            "ratio": dataclasses.asdict(self.ratio) if self.ratio is not None else None,
            "has_interval": self.has_interval,
            "comparable": not self.not_comparable,
            "reason": self.not_comparable,
            "notes": list(self.notes),
            "differences": [dataclasses.asdict(difference) for difference in self.differences],
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
            "page_path": self.page_path,
        }


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
        return "", f"A {found.unit} takes {words.percent(1.0 / ratio.estimate - 1.0)} longer", "bad"
    if allowed is not None:
        return "", f"Not slower by more than {limit} beyond noise: the second is {told}", "plain"
    if found.has_interval and ratio.low <= 1.0 <= ratio.high:
        return "", f"No difference beyond noise: the second is {told}", "plain"
    return words.fast(ratio), f"is the second as the first{_bounds(found, ratio)}", "plain"


def _notes(found: Compared) -> Iterator[str]:
    if found.slower and found.ratio is not None:
        limit, told = words.percent(found.max_regression), _fast(found, found.ratio)
        yield f"Allowed are {limit}; the second is {told}"
    sizes = found.before.step_samples, found.after.step_samples
    if found.unit == "sample" and found.ratio is not None and None not in sizes:
        one, other = (words.quantity(round(size, 1)) for size in sizes if size is not None)
        yield f"A step has {one} samples, then {other}: the times of a sample are compared"
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
