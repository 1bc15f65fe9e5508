"""How plans stand that were measured: which are faster, with which the training ends first, and how much time
is left to find others.
"""

from __future__ import annotations

import dataclasses
import math
import statistics

from vivace.ledger import Ratio, Trial
from vivace.plan import Plan
from vivace.technique import Numerics, Technique
from vivace.tuning.objective import ONE, Length
from vivace.tuning.setting import Setting
from vivace.tuning.times import Times


class Standing:
    """What is known of plans so far. `ranking` may be read at any time."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.times = Times(
            setting.budget_seconds, setting.step_seconds, setting.opening_seconds, setting.compiling_seconds
        )
        self.left = setting.left_seconds  # of the budget
        self._kept_seconds: float | None = None  # of the budget, once a promise was broken
        self.trials: list[Trial] = []
        self.measured: dict[str, Trial] = {}  # by plan, its last trial
        self.best, self.best_ratio, self.best_peak = setting.base, ONE, setting.peak_bytes
        self.reference_fits = self._fits(setting.peak_bytes)
        self._plans: dict[str, Plan] = {}  # those measured
        self._warm: dict[str, float] = {}  # by plan, its warm-up where all is compiled, if that was measured
        self._banned: set[Technique] = set()  # with those settings
        self._spared: set[str] = set()  # plans of which a part is as fast, or that lack only what varies
        self._judged: list[Plan] = []  # verified or confirmed already, and not the answer

    def _fits(self, peak_bytes: int | None) -> bool:
        memory = self.setting.memory
        return memory is None or (peak_bytes is not None and peak_bytes <= memory)

    def ranking(self) -> list[Plan]:
        """Plans that fit and with which the training ends sooner than without, the soonest first; any that
        fit where the reference does not.

        Of what is as soon within the measurement, the plan that changes numbers least stands first, and
        `best` before others that are less than 1 % sooner. Plans of which a part is as fast stand last, and
        those that only lack what varies from process to process, and are not clearly faster without it.
        """
        length = self.length()
        faster = [found for found in self._faster() if self._wins(found[1], found[2])]
        totals = {plan: length.seconds(ratio, warmup) for plan, ratio, warmup in faster}
        if not totals:
            return []
        soonest, ratio, warmup = min(faster, key=lambda found: totals[found[0]])
        near = 1.01 * totals[soonest]
        low = ratio if ratio.wide else dataclasses.replace(ratio, estimate=ratio.low)
        equal = max(near, length.seconds(low, warmup))

        def rank(plan: Plan) -> tuple[bool, float, bool, float]:
            grade = self._promise(plan) if totals[plan] <= equal else math.inf
            return plan.id in self._spared, grade, plan != self.best or totals[plan] > near, totals[plan]

        return sorted(totals, key=rank)

    def not_rejected(self) -> list[Plan]:
        """The ranking without what was verified or confirmed, and turned out not to be the answer."""
        return [plan for plan in self.ranking() if plan not in self._judged]

    def fastest(self) -> Plan | None:
        """The plan with the fastest step of those that beat the reference, whatever its warm-up; none that
        turned out not to be the answer.
        """
        faster = [found for found in self._faster() if found[0] not in self._judged]
        return max(faster, key=lambda found: found[1].counts)[0] if faster else None

    def length(self) -> Length:
        """How long the training takes as it is: by the processes of confirmations, once there are some, which
        are as new as a training's own. One that has computed for long is up to a tenth faster.
        """
        confirmed = [trial for trial in self.trials if trial.role == "confirmation" and trial.pairs]
        steps = [pair[0] for trial in confirmed or self.measured.values() for pair in trial.pairs]
        return self.setting.length(statistics.median(steps) if steps else self.setting.step_seconds)

    def warmup(self, trial: Trial) -> float:
        """What a plan loses at the beginning of a training: its warm-up, of several runs what it is in the
        middle, as only the first one compiles; and what its first pass over the data takes longer.
        """
        plan, length = self._plans.get(trial.plan_id) or Plan.from_dict(trial.techniques), self.length()
        cold = trial.warmup_seconds or 0.0
        again = min(cold, self.times.warmup_again(plan))
        lost = self._warm.get(plan.id, (cold + (length.runs - 1) * again) / length.runs)
        first = any(technique.first_pass_differs for technique in plan.techniques)
        return lost + (length.first_pass(trial.ratio.counts) if first and trial.ratio is not None else 0.0)

    def _promise(self, plan: Plan) -> Numerics:
        return max(plan.promise, Numerics[self.measured[plan.id].promise.upper()])

    def _wins(self, ratio: Ratio, warmup_seconds: float, evaluating: float = 1.0) -> bool:
        """Is it better than the reference: faster beyond noise, and over the whole training too?"""
        if not self.reference_fits:
            return True
        return ratio.low > 1.0 and self.length().pays(ratio, warmup_seconds, evaluating)

    def _faster(self) -> list[tuple[Plan, Ratio, float]]:
        """What beats the reference a step, or only fits where that does not, with its ratio and warm-up."""
        found = []
        for name, trial in self.measured.items():
            plan = self._plans[name]
            banned = self._banned & set(plan.techniques)
            if trial.ratio is None or banned or not self._fits(trial.peak_bytes):
                continue
            if trial.ratio.low > 1.0 or not self.reference_fits:
                found.append((plan, trial.ratio, self.warmup(trial)))
        return found

    # Time

    def _free(self) -> float:
        """Seconds that may still go into finding plans: less what the baselines, dropping, verifying and
        confirming need. Where there is nothing to verify, nothing is kept for that.
        """
        if self._kept_seconds is not None:
            return self.left - self._kept_seconds
        kept = self._baselines_seconds
        ranking = self.ranking()
        if ranking:
            kept += self.times.settling(ranking[0]) + self._dropping_seconds
        return self.left - kept

    @property
    def _dropping_seconds(self) -> float:
        """What is kept for dropping parts of the best plan: up to a fifth of the budget, and what it takes at
        least: one trial for each that lowers the precision or the promise, one for all others that round, and
        one for what is exact.
        """
        sparing, rounding, exact = list[float](), list[float](), list[float]()
        cards = {technique.name: technique.card for technique in self.best.techniques}
        for name in self.setting.coarsest_first(self.best):
            part = self.setting.less(self.best, name)
            if part.id not in self.measured and self.setting.chosen(part):
                kind = exact if cards[name].numerics == Numerics.EXACT else rounding
                kind = sparing if self.setting.spares(self.best, name) else kind
                kind.append(self.times.trial(part))
        least = sum(sparing) + max(rounding, default=0.0) + max(exact, default=0.0)
        return max(least, min(sum(sparing + rounding + exact), 0.2 * self.setting.budget_seconds))

    @property
    def _baselines_seconds(self) -> float:
        """What the first further baseline takes; 0 where that is more than a tenth of the budget."""
        seconds, _ = self.times.baselines()
        affordable = self.setting.num_baselines and seconds <= 0.1 * self.setting.budget_seconds
        return seconds if affordable else 0.0

    def _time_for(self, plan: Plan) -> bool:
        return self._free() > self.times.start(plan)
