"""What a search may try: the techniques that can act on a profiled job, by the gain that their cards name."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Collection, Iterable
from typing import Any

from vivace.errors import PlanError
from vivace.ledger import Profile, Trial
from vivace.machine import Machine
from vivace.plan import Plan
from vivace.technique import Numerics, Stage, Technique, registry

WORTH_TRYING = 1.005


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A technique with settings, the ratio that its card bounds, and what is to be tried beside it."""

    technique: Technique
    predicted: tuple[float, float]
    beside: tuple[Technique, ...] = ()

    def on(self, plan: Plan) -> Plan:
        """A plan with it and what it is tried beside."""
        for technique in (*self.beside, self.technique):
            plan = plan.adding(technique)
        return plan

    @property
    def techniques(self) -> tuple[Technique, ...]:
        """It and what it is tried beside."""
        return (self.technique, *self.beside)

    @property
    def promise(self) -> float:
        """The geometric middle of the prediction: what orders the search."""
        return math.sqrt(self.predicted[0] * self.predicted[1])

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        beside = Plan(self.beside).to_dict()
        return {"plan": Plan([self.technique]).to_dict(), "beside": beside, "predicted": self.predicted}

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Candidate:
        """Rebuild a candidate from `to_dict`'s document."""
        low, high = document["predicted"]
        (technique,) = Plan.from_dict(document["plan"]).techniques
        return cls(technique, (low, high), Plan.from_dict(document["beside"]).techniques)


@dataclasses.dataclass(frozen=True)
class RuledOut:
    """A technique that gets no process, and why."""

    technique: Technique
    reason: str
    predicted: tuple[float, float]


def candidates(
    profile: Profile, machine: Machine, *, allow: Numerics, memory: int | None, unknown: Collection[str] = ()
) -> tuple[list[Candidate], list[RuledOut]]:
    """What may be tried, the most promising first, and what is ruled out.

    `unknown` are techniques that the job's processes do not know. What feeds the step comes first where
    that waits for data most.
    """
    found, ruled_out = list[Candidate](), list[RuledOut]()
    for offer in registry.offers(profile, machine):
        cls, offered, gain = offer.cls, offer.candidates, offer.gain
        if cls.name in unknown:
            continue
        reason = ""
        if profile.device not in cls.card.devices:
            reason = f"it acts on {' and '.join(cls.card.devices)}, and this job runs on {profile.device}"
        elif cls.card.numerics > allow:
            reason = f"it promises {cls.card.numerics.name}, and {allow.name} is allowed"
        elif gain[1] < WORTH_TRYING and memory is None:
            reason = f"at most {gain[1]:.2f}x is predicted on this job"
        elif not offered:
            reason = "it has no setting that suits this job"
        try:
            plans = [(technique, Plan.from_dict(beside)) for technique, beside in offered]
        except PlanError as error:
            reason = reason or f"what it is to be tried beside is no plan: {error}"
        if reason:
            ruled_out.append(RuledOut(offer.default, reason, gain))
        else:
            found += [Candidate(one, gain, plan.techniques) for one, plan in plans if plan.promise <= allow]
    first = Stage.DATA if waits_for_data(profile) else None
    found.sort(key=lambda c: (c.technique.card.stage == first, c.promise), reverse=True)
    return found, ruled_out


def waits_for_data(profile: Profile) -> bool:
    """Is waiting for data the largest part of a step?"""
    return max(profile.shares, key=profile.shares.__getitem__, default="") == "data"


def known_best(
    trials: Iterable[Trial], offered: list[Candidate], allow: Numerics, needed: Collection[str] = ()
) -> Plan | None:
    """The fastest plan that an earlier run measured on this job and machine: tried first.

    What it tried with settings that no longer exist does not count. `needed` are techniques that every plan
    holds, beside those offered.
    """
    names = {technique.name for candidate in offered for technique in candidate.techniques} | {*needed}
    faster = [
        (trial.ratio.counts, trial.techniques)
        for trial in trials
        if trial.ratio is not None
        and trial.ratio.low > 1.0
        and set(trial.techniques) <= names
        and Numerics.__members__.get(trial.promise.upper(), allow + 1) <= allow
    ]
    for _, techniques in sorted(faster, key=lambda found: found[0], reverse=True):
        with contextlib.suppress(PlanError):
            return Plan.from_dict(techniques)
    return None


def stricter(broken: Plan, guilty: set[Technique]) -> Plan | None:
    """A broken plan with stricter settings of its guilty techniques, of all where none is so alone.

    None where none has such. What is guilty and has none is left out.
    """
    changed = {
        technique: registry.asked(technique, "what would be stricter", technique.stricter, None)
        for technique in guilty or broken.techniques
    }
    if not any(changed.values()):
        return None
    return Plan([changed.get(t) or t for t in broken.techniques if t not in guilty or changed[t] is not None])
