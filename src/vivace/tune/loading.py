"""Can this host feed the step, and what was measured to help: one sentence for page, terminal and `tune`."""

from __future__ import annotations

from collections.abc import Iterable

from vivace import registry
from vivace.ledger import Ratio, Trial
from vivace.report import words
from vivace.technique import Stage


def sentence(limit: object, trials: Iterable[Trial]) -> str:
    """The limit of loading as it was seen before the search, and what was faster, the most gain first.

    Empty where loading was no limit.
    """
    if not limit:
        return ""
    feeding = {cls.name for cls in registry.everything() if cls.card.stage == Stage.DATA}
    tried: dict[str, Ratio] = {}
    for trial in trials:
        if trial.ratio and trial.techniques and set(trial.techniques) <= feeding:
            tried[words.plan_name(trial.techniques)] = trial.ratio  # the later one is the confirmation
    helped = sorted(((r.estimate, name) for name, r in tried.items() if r.low > 1), reverse=True)
    if helped:
        found = "measured to help: " + ", ".join(f"{name} {words.times(gain)}" for gain, name in helped)
    elif tried:
        found = "none of what was measured against it was faster"
    else:
        found = "nothing against it was measured alone"
    return f"{limit}; {found}"
