"""What is kept of a search's budget for what has to follow, and how long a search takes at least."""

from __future__ import annotations

import math

from vivace.plan import Plan
from vivace.technique import Numerics
from vivace.tuning.requests import Confirm, Measure, Verify
from vivace.tuning.setting import Setting
from vivace.tuning.standing import Standing
from vivace.tuning.times import LEAST_SECONDS

LEAST_BLOCKS = 9  # of a comparison: four pairs, each of a step at least
FAR = 2.0  # times a budget of a minute or less: what would end later is not begun


class Keeping(Standing):
    """What is `left` of the budget, by what the answers so far say that they took."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.left = setting.left_seconds
        self._kept_seconds: float | None = None  # of the budget, once a promise was broken
        base, passed = setting.base, setting.budget_seconds - setting.left_seconds
        self.least_seconds = passed + self.times.least_seconds(base)
        far = self.least_seconds > FAR * setting.budget_seconds
        self.is_too_short = self.reference_fits and far and setting.budget_seconds <= LEAST_SECONDS

    def to_the_end(self, request: Measure | Verify | Confirm) -> float:
        """About the seconds of what is asked for, and of what has to follow."""
        times = self.times
        match request:
            case Measure(plan):
                found = self.ranking()[:1]
                return times.trial(plan) + sum(map(times.settling_at_least, found))
            case Verify(plan):
                return times.settling_at_least(plan)
        return times.one_round() + times.warmup_again(request.plan)

    @property
    def _left_over(self) -> float:
        """Seconds beside what the best plan needs at least to be verified and confirmed."""
        return self.left - sum(map(self.times.settling_at_least, self.ranking()[:1]))

    def _free(self) -> float:
        """Seconds that may still go into finding plans: less what the baselines, dropping, verifying and
        confirming need. Where there is nothing to verify, nothing is kept for that. None where the budget is
        too short.
        """
        if self.is_too_short:
            return -math.inf
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
        least: one trial for each that changes numbers, and one for all others.
        """
        chosen = self.setting.chosen(self.best)
        coarse, exact = list[float](), list[float]()
        for technique in chosen if len(chosen) > 1 else ():
            part = self.setting.less(self.best, technique.name)
            if part.id not in self.measured:
                kind = exact if technique.card.numerics == Numerics.EXACT else coarse
                kind.append(self.times.trial(part))
        least = sum(coarse) + max(exact, default=0.0)
        return max(least, min(sum(coarse) + sum(exact), 0.2 * self.setting.budget_seconds))

    @property
    def _baselines_seconds(self) -> float:
        """What the first further baseline takes; 0 where that is more than a tenth of the budget."""
        seconds, _ = self.times.baselines()
        affordable = self.setting.num_baselines and seconds <= 0.1 * self.setting.budget_seconds
        return seconds if affordable else 0.0

    def _time_for(self, plan: Plan) -> bool:
        return self._free() > self.times.start(plan) + LEAST_BLOCKS * self.times.step_seconds
