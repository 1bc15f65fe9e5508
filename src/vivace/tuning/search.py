"""The search: forward selection over techniques in the order of their predicted gain, with interactions."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Iterator
from typing import Any

from vivace.ledger import Code, Profile, Ratio, Trial
from vivace.machine import Machine
from vivace.plan import Plan
from vivace.technique import Numerics, Stage, Technique, registry
from vivace.tuning.bench import Bench, one
from vivace.tuning.objective import Length

WORTH_TRYING = 1.005
BETTER = 1.01
CLEARLY_BETTER = 1.05  # two processes of the same plan differ by less
LONGEST_COMPARISON = 15.0  # seconds: what stays undecided then differs by less than the winner's confirmation


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A technique with settings, and the bounds of the ratio that its card predicts."""

    technique: Technique
    predicted: tuple[float, float]

    @property
    def promise(self) -> float:
        """The geometric middle of the prediction: what orders the search."""
        return math.sqrt(self.predicted[0] * self.predicted[1])


def seconds_left(budget_left: float, reserve: float, *, found: bool) -> float:
    """What a search may still use of the budget: the reserve is for verifying and confirming what was found.

    Without anything to verify, a third of it is kept, for what may be found at the last moment.
    """
    return budget_left - (reserve if found else reserve / 3)


class Search:
    """Finds the fastest plan. `ranking` and `fastest` may be read at any time.

    Args:
        end: when the budget is over, on the monotonic clock.
        reserve: seconds of it that verifying and confirming a plan need.
        steps: of the whole training; None where its length is not known.
    """

    def __init__(
        self,
        bench: Bench,
        profile: Profile,
        machine: Machine,
        *,
        end: float,
        reserve: float,
        steps: int | None = None,
    ) -> None:
        self.bench, self.profile, self.machine = bench, profile, machine
        self.end, self.reserve, self.steps = end, reserve, steps
        self.warm: dict[str, float] = {}  # by plan: its warm-up where all is compiled, if that was measured
        self.best = bench.base
        self.best_ratio: Ratio = one()
        self.best_peak: int = bench.observed["peak_bytes"]
        self.reference_fits = bench.fits(self.best_peak)
        self.measured: dict[str, Trial] = {}
        self.banned: set[Technique] = set()  # with those settings
        self._warmup_seconds = 0.0
        self._too_slow: dict[Technique, float] = {}  # seconds after which it had not started yet
        self._too_coarse: set[str] = set()  # techniques that promise more on this job than is allowed
        self._offered: list[Candidate] = []

    def run(self) -> None:
        """Try each candidate on top of the best plan; after a success, try the others again on it."""
        self._offered = self._candidates()
        known = self._known_best(self._offered)
        if known is not None:
            self._try(known, None)
        if self.bench.memory is not None and not self.reference_fits:
            self._try_blocks()
        if waits_for_data(self.profile) and self.best == self.bench.base:
            self._try_feeding()
        self._try_together()
        self._select()
        self._try_unsteady()
        self._explain()
        self._list_untried()

    def _try_blocks(self) -> None:
        """Decisions for the model's blocks, where the job does not fit into the memory budget as it is."""
        if self._left() <= 0:
            self.bench.no_blocks = ", and the budget ended before its blocks could be looked at"
            return
        chosen = self.bench.choose_blocks(max(20.0, 0.5 * self._left()))
        if chosen is not None and chosen != self.best:
            self._try(chosen, None)

    def _try_unsteady(self) -> None:
        """While nothing was found, time again what the machine was too unsteady for."""
        while not self.ranking():
            unsteady = [trial for trial in self.measured.values() if trial.code == Code.UNSTEADY]
            for trial in unsteady:
                if self._left() > 0 and not self.ranking():
                    self._try(Plan.from_dict(trial.techniques), None)
            if not unsteady or self._left() <= 0:
                return
        self._select()

    def _list_untried(self) -> None:
        """Say of each technique that was timed neither alone nor with others that the time ended first."""
        conclusive = [t for t in self.bench.trials if t.status != "failed" or len(t.techniques) == 1]
        tried = {name for trial in conclusive for name in trial.techniques}
        for candidate in self._offered:
            if candidate.technique.name not in tried and self._left() <= 0:
                tried.add(candidate.technique.name)
                reason = "the time for the search ended before it could be tried"
                self.bench.refuse(Plan([candidate.technique]), reason, Code.NOT_TRIED, candidate.predicted)

    def _try_feeding(self) -> None:
        """The most promising technique that acts on data, alone; while none is faster, the next one."""
        tried = set[str]()
        for candidate in self._offered:
            technique = candidate.technique
            if technique.card.stage != Stage.DATA or technique.name in tried or self._left() <= 0:
                continue
            tried.add(technique.name)
            if self._try(self.bench.base.adding(technique), candidate):
                break

    def _try_together(self) -> None:
        """All that is likely to help and quick to start, at once: some techniques only pay in company.

        On a CPU, for example, bfloat16 convolutions are slower than fp32 ones unless their layout is
        channels-last.
        """
        refused = {plan for plan, trial in self.measured.items() if trial.status == "refused"}
        likely = [c.technique for c in self._offered if c.promise >= 1.0]
        plan = self.bench.base
        for technique in likely:
            quick = not (technique.card.compiles or technique.card.captures)
            if quick and Plan([technique]).id not in refused and len(plan.adding(technique)) > len(plan):
                plan = plan.adding(technique)
        while len(plan) > 1 and self._left() > 0 and plan.id not in self.measured:
            self._try(plan, None)
            trial = self.measured[plan.id]
            plan = plan.without(trial.technique if trial.status == "refused" else "")

    def ban(self, techniques: set[Technique], seconds: float) -> None:
        """Leave techniques with these settings out from now on, and search again for `seconds`."""
        self.banned |= techniques
        self.best, self.best_ratio, self.best_peak = self.bench.base, one(), self.bench.observed["peak_bytes"]
        self._warmup_seconds = 0.0
        for plan in self.ranking()[:1]:
            self._keep(plan, self.measured[plan.id])
        self.reserve = self.end - time.monotonic() - seconds
        self._select()

    def _select(self) -> None:
        candidates = [c for c in self._offered if c.technique not in self.banned]
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
        self._refine()

    def _in_turn(self, candidates: list[Candidate]) -> Iterator[Candidate]:
        """First what can be added, then what displaces a technique of the best plan, then what compiles."""
        later, last = [], []
        for candidate in candidates:
            if candidate.technique.card.compiles:
                last.append(candidate)
            elif len(self.best.adding(candidate.technique)) > len(self.best):
                yield candidate
            else:
                later.append(candidate)
        yield from [*later, *last]

    def ranking(self) -> list[Plan]:
        """Plans that fit and with which the training ends sooner than without, the soonest first; any that
        fit where the reference does not.

        `best` stays before others that are less than 1 % sooner: it was rid of what adds nothing.
        """
        length = self.length()
        totals = {
            plan: length.seconds(ratio, warmup)
            for plan, ratio, warmup in self._faster()
            if self.wins(ratio, warmup)
        }
        near = 1.01 * min(totals.values(), default=0.0)
        return sorted(totals, key=lambda plan: (plan != self.best or totals[plan] > near, totals[plan]))

    def fastest(self) -> Plan | None:
        """The plan with the fastest step of those that beat the reference, whatever its warm-up."""
        faster = self._faster()
        return max(faster, key=lambda found: found[1].counts)[0] if faster else None

    def wins(self, ratio: Ratio, warmup_seconds: float) -> bool:
        """Is it better than the reference: faster beyond noise, and over the whole training too?"""
        if not self.reference_fits:
            return True
        return ratio.low > 1.0 and self.length().pays(ratio, warmup_seconds)

    def length(self) -> Length:
        """How long the training takes as it is."""
        steps = [pair[0] for trial in self.measured.values() for pair in trial.pairs]
        return Length(self.steps, statistics.median(steps) if steps else self.bench.reference.step_seconds)

    def _faster(self) -> list[tuple[Plan, Ratio, float]]:
        """What beats the reference a step, or only fits where that does not, with its ratio and warm-up."""
        found = []
        for trial in self.measured.values():
            plan = Plan.from_dict(trial.techniques)
            banned = self.banned & set(plan.techniques)
            if trial.ratio is None or banned or not self.bench.fits(trial.peak_bytes):
                continue
            if trial.ratio.low > 1.0 or not self.reference_fits:
                warmup = self.warm.get(plan.id, trial.warmup_seconds or 0.0)
                found.append((plan, trial.ratio, warmup))
        return found

    def _refine(self) -> None:
        """Try each technique of the best plan refined, and again, while that is clearly faster."""
        for name in self.best.names:
            found = True
            while found and self._left() > 0:
                refined = next(one for one in self.best.techniques if one.name == name).refined()
                if refined is None:
                    break
                plan = self.best.adding(refined)
                found = plan.id not in self.measured and self._try(plan, None, by=CLEARLY_BETTER)

    def _try(self, plan: Plan, candidate: Candidate | None, by: float = BETTER) -> bool:
        now = self.best_ratio.counts
        predicted = (candidate.predicted[0] * now, candidate.predicted[1] * now) if candidate else None
        target = by * now if self.bench.fits(self.best_peak) else None
        trial = self.measure(plan, target, predicted)
        if candidate is not None and trial.code == Code.TOO_COARSE:
            self._too_coarse.add(candidate.technique.name)
        if trial.ratio is None or not self._better(trial, by):
            return False
        self._keep(plan, trial)
        return True

    def _better(self, trial: Trial, by: float) -> bool:
        """Within the memory budget the faster plan wins; outside of it the smaller one."""
        assert trial.ratio is not None
        assert trial.peak_bytes is not None
        if not self.bench.fits(trial.peak_bytes):
            return not self.bench.fits(self.best_peak) and trial.peak_bytes < 0.98 * self.best_peak
        if not self.bench.fits(self.best_peak):
            return True
        beats = trial.ratio.low > 1.0 or not self.reference_fits
        return beats and trial.ratio.counts >= by * self.best_ratio.counts

    def measure(
        self, plan: Plan, target: float | None = None, predicted: tuple[float, float] | None = None
    ) -> Trial:
        """One trial: at most half of the time left, of which a tenth for the comparison, up to a limit.

        What compiles comes last and may take all of it.
        """
        left = self._left()
        slow = any(technique.card.compiles for technique in plan.techniques)
        seconds = left if slow else min(left, max(15.0, 0.5 * left))
        enough = max(LONGEST_COMPARISON, 30 * self.bench.reference.step_seconds)
        comparing = max(6.0, min(0.1 * left, enough))
        trial = self.bench.measure(
            plan, seconds=seconds, comparing=comparing, predicted=predicted, target=target
        )
        self.measured[plan.id] = trial
        if trial.code == Code.TIMED_OUT:
            self._too_slow.update({technique: seconds for technique in plan.techniques if slow})
        return trial

    def _keep(self, plan: Plan, trial: Trial) -> None:
        """Make a trial's plan the best one; to verify and confirm it means three warm-ups more."""
        assert trial.ratio is not None
        assert trial.warmup_seconds is not None
        self.best, self.best_ratio, self.best_peak = plan, trial.ratio, trial.peak_bytes or 0
        self.reserve += 3 * (trial.warmup_seconds - self._warmup_seconds)
        self._warmup_seconds = trial.warmup_seconds

    def _hopeless(self, plan: Plan, candidate: Candidate) -> bool:
        """Was it refused for good, is it much slower than what it would displace, or slower to start than
        the time left allows?
        """
        name = candidate.technique.name
        if name in self._too_coarse or self._too_slow.get(candidate.technique, 0.0) > 0.7 * self._left():
            return True
        if candidate.technique.card.stage == Stage.MEMORY and self._milder_is_slow(plan, candidate):
            return True
        alone = self.measured.get(Plan([candidate.technique]).id)
        if alone is None:
            return False
        if alone.status == "refused" or (alone.status == "failed" and alone.code != Code.UNSTEADY):
            return True
        displaced = len(plan) <= len(self.best)
        return displaced and alone.ratio is not None and alone.ratio.high < 0.9 * self.best_ratio.counts

    def _milder_is_slow(self, plan: Plan, candidate: Candidate) -> bool:
        """Was another setting, milder because it was offered earlier, far slower on the same techniques?"""
        name = candidate.technique.name
        return any(
            trial.ratio is not None
            and trial.ratio.high < 0.9 * self.best_ratio.counts
            and Plan.from_dict(trial.techniques).without(name) == plan.without(name)
            for trial in self.measured.values()
            if name in trial.techniques
        )

    def _prune(self) -> None:
        """Drop techniques that add nothing to the best plan, while there is time."""
        for name in reversed(self.best.names):
            without = self.best.without(name)
            if self._left() <= 0 or len(self.best) < 2 or without.id in self.measured:
                continue
            trial = self.measure(without, self.best_ratio.counts)
            no_slower = trial.ratio is not None and trial.ratio.counts >= 0.995 * self.best_ratio.counts
            if no_slower and self.bench.fits(trial.peak_bytes):
                self._keep(without, trial)

    def _explain(self) -> None:
        """Measure what each technique adds to the ones before it, while there is time."""
        for plan in _prefixes(self.best):
            if self._left() > 0 and plan.id not in self.measured:
                self.measure(plan)

    def waterfall(self, plan: Plan, confirmed: Ratio) -> list[dict[str, Any]]:
        """The ratio as one technique of `plan` after the other is added, in the order of their stages.

        Techniques between two measured plans share a step; the last step is the plan's `confirmed` ratio.
        """
        steps, waiting = [], list[str]()
        for prefix, name in zip(_prefixes(plan), plan.names, strict=True):
            waiting.append(name)
            trial = self.measured.get(prefix.id)
            ratio = confirmed if prefix == plan else trial.ratio if trial is not None else None
            if ratio is not None:
                steps.append({"step": " + ".join(waiting), "ratio": dataclasses.asdict(ratio)})
                waiting = []
        return steps

    def _candidates(self) -> list[Candidate]:
        found = []
        for offer in registry.offers(self.profile, self.machine):
            cls, offered, gain = offer.cls, offer.candidates, offer.gain
            if cls.name in self.bench.only_here:
                continue
            device = self.profile.device
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
                self.bench.refuse(Plan([offer.default]), reason, Code.RULED_OUT, gain)
            else:
                found += [Candidate(technique, gain) for technique in offered]
        first = Stage.DATA if waits_for_data(self.profile) else None
        return sorted(found, key=lambda c: (c.technique.card.stage == first, c.promise), reverse=True)

    def _known_best(self, candidates: list[Candidate]) -> Plan | None:
        """The fastest plan that an earlier run measured on this job and machine: tried first."""
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
        return Plan.from_dict(max(earlier, key=lambda t: t.ratio.counts if t.ratio else 0.0).techniques)

    def _left(self) -> float:
        return seconds_left(self.end - time.monotonic(), self.reserve, found=bool(self.ranking()))


def waits_for_data(profile: Profile) -> bool:
    """Is waiting for data the largest part of a step?"""
    return max(profile.shares, key=profile.shares.__getitem__, default="") == "data"


def _prefixes(plan: Plan) -> list[Plan]:
    """The first technique alone, the first two, and so on up to the whole plan."""
    return [Plan(plan.techniques[: count + 1]) for count in range(len(plan))]
