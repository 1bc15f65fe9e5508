"""How much each parameter matters for being among the best trials, with intervals over resampled trials."""

from __future__ import annotations

import random
from collections.abc import Callable

from optuna.trial import FrozenTrial, TrialState

LEAST_TRIALS = 10
RESAMPLED = 40


def importances_of(
    trials: list[FrozenTrial], evaluate: Callable[[list[FrozenTrial]], dict[str, float]], seed: int
) -> dict[str, dict[str, float]]:
    """By parameter, largest first: estimate, low and high of an 80 % bootstrap interval.

    Empty with fewer than `LEAST_TRIALS` complete trials: so few tell nothing.
    """
    done = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    if len(done) < LEAST_TRIALS or len({trial.values[0] for trial in done}) == 1:
        return {}
    whole, choice = evaluate(done), random.Random(seed)
    samples: list[dict[str, float]] = []
    for _ in range(RESAMPLED):
        drawn = choice.choices(done, k=len(done))
        if len({trial.values[0] for trial in drawn}) > 1:
            samples.append(evaluate(drawn))
    found = {}
    for name, estimate in whole.items():
        values = sorted(sample.get(name, 0.0) for sample in samples)
        low, high = values[len(values) // 10], values[-1 - len(values) // 10]
        found[name] = {"estimate": estimate, "low": min(low, estimate), "high": max(high, estimate)}
    return found
