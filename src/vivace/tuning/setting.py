"""What a search begins with and what it ends with: data, without any process behind it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from vivace.ledger import Outcome, Ratio
from vivace.measuring.pace import COMPILING_SECONDS
from vivace.plan import Plan
from vivace.technique import Numerics, Technique
from vivace.technique.contract import UNIT_ROUNDOFF
from vivace.tuning.candidates import Candidate
from vivace.tuning.objective import Beside, Length
from vivace.tuning.ranks import chosen, joined
from vivace.tuning.result import LongPlan
from vivace.verifying.verdict import Verdict

FP32_ROUNDOFF = UNIT_ROUNDOFF["float32"]
BETTER = 1.01  # a technique that brings less is not worth its line in the plan
CLEARLY_BETTER = 1.05  # two processes of the same plan differ by less, but for what varies


@dataclasses.dataclass(frozen=True)
class Setting:
    """All that a search rests on beside what it is told.

    Args:
        budget_seconds: of the whole tuning; `left_seconds` of it are left when the search begins.
        step_seconds, peak_bytes: of the reference, whose process took `opening_seconds` to be warm.
        base: the reference; `needed` is the part of it that every plan holds, if with other settings.
        auto: does the budget follow from the training? Then nothing is tried that can save less than trying
            it costs.
        memory: the largest peak in bytes that a plan may need, if there is a limit.
        steps: of the whole training; None where its length is not known. An epoch has `epoch_steps`.
        runs: how often it is trained; `beside` is what one training takes beside its steps.
        first: a plan that is tried before all others.
        feeds_first: does the step wait for data most?
        num_baselines: that are measured beside strict fp32.
        compiling_seconds: about what it takes to compile the model.
    """

    candidates: tuple[Candidate, ...]
    budget_seconds: float
    left_seconds: float
    step_seconds: float
    opening_seconds: float
    peak_bytes: int
    base: Plan = dataclasses.field(default_factory=Plan)
    needed: Plan = dataclasses.field(default_factory=Plan)
    auto: bool = False
    memory: int | None = None
    steps: int | None = None
    epoch_steps: int | None = None
    runs: int = 1
    beside: Beside = dataclasses.field(default_factory=Beside)
    first: Plan | None = None
    feeds_first: bool = False
    num_baselines: int = 0
    compiling_seconds: float = COMPILING_SECONDS

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        first = self.first.to_dict() if self.first is not None else None
        offered = [candidate.to_dict() for candidate in self.candidates]
        plans = {"base": self.base.to_dict(), "needed": self.needed.to_dict(), "first": first}
        beside = dataclasses.asdict(self.beside)
        return {**vars(self), **plans, "candidates": offered, "beside": beside}

    def length(self, step_seconds: float) -> Length:
        """How long the training takes as it is, with steps of so many seconds."""
        return Length(self.steps, step_seconds, self.beside, self.runs, self.epoch_steps)

    def alone(self, *techniques: Technique) -> Plan:
        """The plan of these techniques and of nothing that is not needed."""
        return joined(self.needed, Plan(techniques))

    def less(self, plan: Plan, name: str) -> Plan:
        """A plan less the technique called `name`, or with the settings of it that are needed."""
        return joined(self.needed, plan.without(name))

    def chosen(self, plan: Plan) -> tuple[Technique, ...]:
        """The techniques of a plan that are not needed as they are."""
        return chosen(plan, self.needed)

    def chosen_names(self, techniques: Mapping[str, Any]) -> list[str]:
        """The same of a trial's techniques, by their names."""
        needed = self.needed.to_dict()
        return [name for name, settings in techniques.items() if needed.get(name) != settings]

    def coarsest_first(self, plan: Plan) -> list[str]:
        """The techniques of a plan that may be dropped: what changes numbers most first, then what promises
        least.
        """
        promises = {one.technique.name: one.promise for one in self.candidates}

        def rank(technique: Technique) -> tuple[Numerics, float, float]:
            card = technique.card
            return card.numerics, card.unit_roundoff, -promises.get(technique.name, 1.0)

        return [one.name for one in sorted(self.chosen(plan), key=rank)[::-1]]

    def spares(self, plan: Plan, name: str) -> bool:
        """Does the technique called `name` lower the precision, or would a plan promise more without it?"""
        return is_coarse(plan, name) or self.less(plan, name).promise < plan.promise

    def without(self, plan: Plan, names: Sequence[str], *, exact: bool) -> Plan:
        """A plan less those of these techniques that are exact, or less those that are not; what varies, and
        the last one there is, it keeps.
        """
        cards = {one.name: one.card for one in plan.techniques}
        for name in filter(cards.get, names):
            less, card = self.less(plan, name), cards[name]
            if (card.numerics == Numerics.EXACT) is exact and not card.varies and self.chosen(less):
                plan = less
        return plan

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Setting:
        """Rebuild a setting from `to_dict`'s document."""
        offered = tuple(Candidate.from_dict(one) for one in document["candidates"])
        first = Plan.from_dict(document["first"]) if document["first"] is not None else None
        plans = {name: Plan.from_dict(document.get(name, {})) for name in ("base", "needed")}
        beside = Beside(**document.get("beside", {}))
        return cls(**{**document, **plans, "candidates": offered, "first": first, "beside": beside})


@dataclasses.dataclass(frozen=True)
class Conclusion:
    """The plan of a search, how much faster than the reference it is, and why it is no other.

    `more_time` is the budget, such as ``5m``, that says more, where the given one ended first.
    """

    plan: Plan
    speedup: Ratio
    outcome: Outcome
    reason: str = ""
    verdict: Verdict | None = None
    long_plan: LongPlan | None = None
    more_time: str = ""


def is_coarse(plan: Plan, name: str) -> bool:
    """Does the technique of that name lower the precision?"""
    return any(one.name == name and one.card.unit_roundoff > FP32_ROUNDOFF for one in plan.techniques)


def lacks_what_varies(without: Plan, plan: Plan) -> bool:
    """Is the difference to a `plan` something of which a single trial does not tell what it adds?"""
    return any(one.card.varies for one in plan.techniques if one not in without.techniques)


def as_fast(fastest: Ratio, plan: Plan, without: Plan) -> float:
    """The ratio from which a plan is as fast `without` a part of it: a hundredth less, or where that spares a
    coarse precision all that the measurement cannot tell apart. Without what varies it is clearly more.
    """
    if lacks_what_varies(without, plan):
        return CLEARLY_BETTER * fastest.counts
    least = fastest.counts / BETTER
    coarse = any(is_coarse(plan, one.name) for one in plan.techniques if one not in without.techniques)
    return min(least, fastest.low) if coarse and not fastest.wide else least
