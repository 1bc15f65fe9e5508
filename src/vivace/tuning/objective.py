"""What `tune` minimises: the seconds of the person's whole training, warm-up and steps."""

from __future__ import annotations

import dataclasses
import math

from vivace.ledger import Ratio

START_SECONDS = 1.0  # by which the first steps of two processes of the same job differ, on a busy machine


@dataclasses.dataclass(frozen=True)
class Length:
    """How long a training is: `steps` of `step_seconds` under the reference; None where that is not known."""

    steps: int | None
    step_seconds: float

    def seconds(self, ratio: Ratio, warmup_seconds: float) -> float:
        """Of the whole training under a plan; of one step where its length is not known."""
        if self.steps is None:
            return self.step_seconds / ratio.counts
        return self._start(warmup_seconds) + self.steps * self.step_seconds / ratio.counts

    def pays(self, ratio: Ratio, warmup_seconds: float) -> bool:
        """Does the training end sooner with the plan than without it?"""
        return self.steps is None or self.seconds(ratio, warmup_seconds) < self.steps * self.step_seconds

    def wins_from(
        self, later: tuple[Ratio, float], sooner: tuple[Ratio, float] = (Ratio(1.0, 1.0, 1.0), 0.0)
    ) -> int | None:
        """The number of steps from which one plan ends before the other; None where it never does.

        Each is its ratio and its warm-up in seconds.
        """
        gained = self.step_seconds / sooner[0].counts - self.step_seconds / later[0].counts
        if gained <= 0:
            return None
        return max(1, math.ceil((self._start(later[1]) - self._start(sooner[1])) / gained) + 1)

    def foretold(self, ratio: Ratio, warmup_seconds: float) -> dict[str, float]:
        """Seconds of the steps under the ``reference``, and with the warm-up under the ``plan``.

        By the interval of its speed they are between ``plan_low`` and ``plan_high``. Empty where the length
        of a training is not known.
        """
        if self.steps is None:
            return {}
        reference = self.steps * self.step_seconds
        counted = {"plan": ratio.counts, "plan_low": ratio.high, "plan_high": ratio.low}
        plans = {key: warmup_seconds + reference / fast for key, fast in counted.items()}
        return {"reference": reference, **plans}

    @staticmethod
    def _start(warmup_seconds: float) -> float:
        return max(0.0, warmup_seconds - START_SECONDS)
