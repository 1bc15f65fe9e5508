"""The search: forward selection over techniques in the order of their predicted gain, with interactions."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator
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
        self._warmup_seconds = 0.0

    def run(self) -> None:
        """Try each candidate on top of the best plan; after a success, try the others again on it."""
        candidates = self._candidates()
        known = self._known_best(candidates)
        if known is not None:
            self._try(known, None)
        changed = True
        while changed and self._left() > 0:
            changed = False
            for candidate in self._in_turn(candidates):
                if self._left() <= 0:
                    break
                plan = self.best.adding(candidate.technique)
                if plan != self.best and plan.id not in self.measured and not self._hopeless(plan, candidate):
                    changed |= self._try(plan, candidate)
        self._prune()

    def _in_turn(self, candidates: list[Candidate]) -> Iterator[Candidate]:
        """What can be added first, then what would displace a technique of the best plan."""
        later = []
        for candidate in candidates:
            if len(self.best.adding(candidate.technique)) > len(self.best):
                yield candidate
            else:
                later.append(candidate)
        yield from later

    def ranking(self) -> list[Plan]:
        """Measured plans that beat the reference, the fastest first; the search's best leads."""
        faster = [t for t in self.measured.values() if t.ratio is not None and t.ratio.low > 1.0]
        ordered = sorted(faster, key=lambda t: t.ratio.estimate if t.ratio else 0.0, reverse=True)
        plans = [Plan.from_dict(trial.techniques) for trial in ordered]
        return [self.best, *(plan for plan in plans if plan != self.best)] if len(self.best) else plans

    def _try(self, plan: Plan, candidate: Candidate | None) -> bool:
        now = self.best_ratio.estimate
        predicted = (candidate.predicted[0] * now, candidate.predicted[1] * now) if candidate else None
        trial = self._measure(plan, BETTER * self.best_ratio.estimate, predicted)
        if (
            trial.ratio is None
            or trial.ratio.low <= 1.0
            or trial.ratio.estimate < BETTER * self.best_ratio.estimate
        ):
            return False
        added = [name for name in plan.names if name not in self.best.names]
        self._keep(plan, trial)
        step = {"step": " + ".join(added) or str(plan), "ratio": dataclasses.asdict(trial.ratio)}
        kept = [entry for entry in self.waterfall if set(entry["step"].split(" + ")) <= set(plan.names)]
        self.waterfall = [*kept, step]
        return True

    def _measure(self, plan: Plan, target: float, predicted: tuple[float, float] | None = None) -> Trial:
        """One trial: at most half of the time left, of which a tenth of the time left for the comparison."""
        left = self._left()
        seconds, comparing = min(left, max(15.0, 0.5 * left)), max(6.0, 0.1 * left)
        trial = self.bench.measure(
            plan, seconds=seconds, comparing=comparing, predicted=predicted, target=target
        )
        self.measured[plan.id] = trial
        return trial

    def _keep(self, plan: Plan, trial: Trial) -> None:
        """Make a trial's plan the best one; verifying and confirming it will warm it up twice more."""
        assert trial.ratio is not None
        assert trial.warmup_seconds is not None
        self.best, self.best_ratio = plan, trial.ratio
        self.deadline -= 2 * (trial.warmup_seconds - self._warmup_seconds)
        self._warmup_seconds = trial.warmup_seconds

    def _hopeless(self, plan: Plan, candidate: Candidate) -> bool:
        """Was this technique refused for good, or is it much slower than what it would displace?"""
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
            trial = self._measure(without, self.best_ratio.estimate)
            if trial.ratio is not None and trial.ratio.estimate >= 0.995 * self.best_ratio.estimate:
                self._keep(without, trial)
                self.waterfall = [entry for entry in self.waterfall if entry["step"] != name]

    def _candidates(self) -> list[Candidate]:
        found = []
        for cls in registry.everything():
            device = self.profile.device
            offered = cls.candidates(self.profile, self.machine)
            gain = cls.gain(self.profile, self.machine)
            reason = ""
            if device not in cls.card.devices:
                reason = f"it acts on {' and '.join(cls.card.devices)}, and this job runs on {device}"
            elif cls.card.numerics > self.bench.allow:
                reason = f"it promises {cls.card.numerics.name}, and {self.bench.allow.name} is allowed"
            elif gain[1] < WORTH_TRYING and self.bench.memory is None:
                reason = f"at most {gain[1]:.2f}x is predicted on this job"
            elif not offered:
                reason = "it has no setting that suits this job"
            if reason:
                self.bench.refuse(Plan([*offered, cls()][:1]), reason, predicted=gain)
            else:
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
