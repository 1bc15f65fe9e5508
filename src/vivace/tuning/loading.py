"""Can this host feed the step, and what was measured to help: one sentence for page, terminal and `tune`."""

from __future__ import annotations

from collections.abc import Iterable

from vivace import words
from vivace.ledger import Ratio, Trial
from vivace.plan import Plan
from vivace.reporting import phrases
from vivace.technique import Stage


def sentence(limit: object, trials: Iterable[Trial]) -> str:
    """The limit of loading as it was seen before the search, and what was faster, the most gain first.

    A technique helped where a plan was faster with it than without, beyond both intervals. Empty where
    loading was no limit.
    """
    if not limit:
        return ""
    measured = [
        (Plan.from_dict(trial.techniques), trial.ratio) for trial in trials if trial.ratio is not None
    ]
    ratios = {plan.id: ratio for plan, ratio in measured}  # the later one is the confirmation
    ratios[Plan().id] = Ratio(1.0, 1.0, 1.0)
    gains: dict[str, float] = {}
    for plan, _ in measured:
        for technique in plan.techniques:
            found, without = ratios[plan.id], ratios.get(plan.without(technique.name).id)
            if technique.card.stage == Stage.DATA and without is not None:
                shown = phrases.plan_name(Plan([technique]).to_dict())
                gain = found.counts / without.counts if found.low > without.high else 0.0
                gains[shown] = max(gains.get(shown, 0.0), gain)
    helped = sorted(((gain, name) for name, gain in gains.items() if gain), reverse=True)
    if helped:
        told = "measured to help: " + ", ".join(f"{name} {words.times(gain)}" for gain, name in helped)
    elif gains:
        told = "none of what was measured against it was faster"
    else:
        told = "nothing against it was measured by itself"
    return f"{limit}; {told}"
