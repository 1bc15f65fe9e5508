"""What `vivace.compare` returns."""

from __future__ import annotations

import dataclasses
from typing import Any

from vivace.comparing.sides import Side
from vivace.errors import AnswerIsNo
from vivace.ledger import Ratio


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
    says why speeds cannot be compared, and is empty where they can. `max_regression` is the share by which a
    step may take longer, None where nothing was asked; `slower` is then the answer, None where there is none.
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
    def exit_code(self) -> int:
        """0; 1 where it is slower by more than was allowed, or where that was asked and cannot be told."""
        fine = self.max_regression is None or self.slower is False
        return 0 if fine else AnswerIsNo.exit_code

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from vivace.comparing.answering import answer
        from vivace.pages.card import card

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
