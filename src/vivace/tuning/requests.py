"""What a search asks to have done, and what it is told: data, without any process behind it."""

from __future__ import annotations

import dataclasses
from typing import Any

from vivace.ledger import Code, Trial
from vivace.plan import Plan
from vivace.verifying.verdict import Verdict


@dataclasses.dataclass(frozen=True)
class Measure:
    """Time a plan against the reference, in `seconds` at most, of which `comparing` are for the timing.

    `predicted` are the bounds of its ratio by the cards; `target` is the ratio to beat.
    """

    plan: Plan
    seconds: float
    comparing: float
    predicted: tuple[float, float] | None = None
    target: float | None = None


@dataclasses.dataclass(frozen=True)
class ChooseBlocks:
    """Decide block by block within the memory budget, in `seconds` at most."""

    seconds: float


@dataclasses.dataclass(frozen=True)
class MeasureBaselines:
    """Time PyTorch's defaults, and TF32 where there is one, against strict fp32: `comparing` seconds each."""

    seconds: float
    comparing: float


@dataclasses.dataclass(frozen=True)
class WarmAgain:
    """Open a plan where all that it compiles is compiled already, in `seconds` at most."""

    plan: Plan
    seconds: float


@dataclasses.dataclass(frozen=True)
class Verify:
    """Does a plan keep its promise? `left` of the budget are there for a metric, should it be needed; so many
    `more` plans are verified whatever the answer.
    """

    plan: Plan
    seconds: float
    left: float
    more: int = 0


@dataclasses.dataclass(frozen=True)
class Confirm:
    """Measure a plan afresh in several pairs of processes, each timed for `round_seconds`."""

    plan: Plan
    seconds: float
    round_seconds: float


@dataclasses.dataclass(frozen=True)
class LeaveOut:
    """Record that a plan is not tried, because the time ended first or because it cannot pay."""

    plan: Plan
    reason: str
    predicted: tuple[float, float]
    code: Code = Code.NOT_TRIED


@dataclasses.dataclass(frozen=True)
class Done:
    """What was asked for took so many `seconds`; with the plan or the warm-up that it found, if any."""

    seconds: float
    plan: Plan | None = None
    warmup_seconds: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        return {**vars(self), "plan": self.plan.to_dict() if self.plan is not None else None}


Request = Measure | ChooseBlocks | MeasureBaselines | WarmAgain | Verify | Confirm | LeaveOut
Answer = Trial | Verdict | Done
