"""The search: forward selection over techniques in the order of their predicted gain, with interactions."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

from vivace import registry
from vivace.ledger import Profile, Ratio, Trial
from vivace.machine import Machine
from vivace.plan import Plan
from vivace.technique import Numerics, Technique
from vivace.tune.bench import Bench, one

WORTH_TRYING = 1.005
BETTER = 1.01


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A technique with settings, and the bounds of the ratio that its card predicts."""

    technique: Technique
    predicted: tuple[float, float]

    @property
    def promise(self) -> float:
        """The geometric middle of the prediction: what orders the search."""
        return math.sqrt(self.predicted[0] * self.predicted[1])


class Search:
    """Finds the fastest plan until the deadline. `best` and `ranking` may be read at any time."""

    def __init__(self, bench: Bench, profile: Profile, machine: Machine, *, deadline: float) -> None:
        self.bench, self.profile, self.machine = bench, profile, machine
        self.deadline = deadline
        self.best = Plan()
        self.best_ratio: Ratio = one()
        self.waterfall: list[dict[str, Any]] = []
        self.measured: dict[str, Trial] = {}

    def run(self) -> None:
        """Try each candidate on top of the best plan; after a success, try the others again on the new ground."""
        candidates = self._candidates()
        known = self._known_best(candidates)
        if known is not None:
            self._try(known, None)
        changed = True
        while changed and self._left() > 0:
            changed = False
            for candidate in candidates:
                if self._left() <= 0:
                    break
                plan = self.best.adding(candidate.technique)
                if plan == self.best or plan.id in self.measured or self._hopeless(plan, candidate):
                    continue
                changed |= self._try(plan, candidate)
        self._prune()

    def ranking(self) -> list[Plan]:
        """Measured plans that beat the reference, the fastest first; the search's best leads."""
        faster = [t for t in self.measured.values() if t.ratio is not None and t.ratio.low > 1.0]
        ordered = sorted(faster, key=lambda t: t.ratio.estimate if t.ratio else 0.0, reverse=True)
        plans = [Plan.from_dict(trial.techniques) for trial in ordered]
        return [self.best, *(plan for plan in plans if plan != self.best)] if len(self.best) else plans

    def _try(self, plan: Plan, candidate: Candidate | None) -> bool:
        predicted = candidate.predicted if candidate is not None else None
        seconds = min(self._left(), max(8.0, 0.35 * self._left()))
        trial = self.bench.measure(plan, seconds=seconds, predicted=predicted, best=self.best_ratio.estimate)
        self.measured[plan.id] = trial
        if (
            trial.ratio is None
            or trial.ratio.low <= 1.0
            or trial.ratio.estimate < BETTER * self.best_ratio.estimate
        ):
            return False
        added = [name for name in plan.names if name not in self.best.names]
        self.best, self.best_ratio = plan, trial.ratio
        step = {"step": " + ".join(added) or str(plan), "ratio": dataclasses.asdict(trial.ratio)}
        kept = [entry for entry in self.waterfall if set(entry["step"].split(" + ")) <= set(plan.names)]
        self.waterfall = [*kept, step]
        return True

    def _hopeless(self, plan: Plan, candidate: Candidate) -> bool:
        """Was this technique refused for good, or so slow alone that no company mends it within its prediction?"""
        alone = self.measured.get(Plan([candidate.technique]).id)
        if alone is None:
            return False
        if alone.status == "refused" or (alone.status == "failed" and "unsteady" not in alone.reason):
            return True
        displaced = len(plan) <= len(self.best)
        return displaced and alone.ratio is not None and alone.ratio.high < 0.9 * self.best_ratio.estimate

    def _prune(self) -> None:
        """Drop techniques that add nothing to the best plan, while there is time."""
        for name in reversed(self.best.names):
            without = self.best.without(name)
            if self._left() <= 0 or len(self.best) < 2 or without.id in self.measured:
                continue
            trial = self.bench.measure(without, seconds=self._left(), best=self.best_ratio.estimate)
            self.measured[without.id] = trial
            if trial.ratio is not None and trial.ratio.estimate >= 0.995 * self.best_ratio.estimate:
                self.best, self.best_ratio = without, trial.ratio
                self.waterfall = [entry for entry in self.waterfall if entry["step"] != name]

    def _candidates(self) -> list[Candidate]:
        found = []
        for cls in registry.everything():
            device = self.profile.device
            offered = cls.candidates(self.profile, self.machine)
            gain = cls.gain(self.profile, self.machine)
            reason = ""
            if device not in cls.card.devices:
                offered = offered or [cls()]
                reason = f"it acts on {' and '.join(cls.card.devices)}, and this job runs on {device}"
            elif cls.card.numerics > self.bench.allow:
                reason = f"it promises {cls.card.numerics.name}, and {self.bench.allow.name} is allowed"
            elif gain[1] < WORTH_TRYING and self.bench.memory is None:
                reason = f"at most {gain[1]:.2f}x is predicted on this job"
            if reason:
                for technique in offered[:1]:
                    self.bench.refuse(Plan([technique]), reason, predicted=gain)
                continue
            found += [Candidate(technique, gain) for technique in offered]
        return sorted(found, key=lambda candidate: candidate.promise, reverse=True)

    def _known_best(self, candidates: list[Candidate]) -> Plan | None:
        """The best plan that an earlier run on this job and machine confirmed: tried first."""
        allowed = {candidate.technique.name for candidate in candidates}
        earlier = [
            t
            for t in self.bench.known.values()
            if t.ratio is not None
            and t.ratio.low > 1.0
            and set(t.techniques) <= allowed
            and Numerics[t.promise.upper()] <= self.bench.allow
        ]
        if not earlier:
            return None
        return Plan.from_dict(max(earlier, key=lambda t: t.ratio.estimate if t.ratio else 0.0).techniques)

    def _left(self) -> float:
        return self.deadline - time.monotonic()
