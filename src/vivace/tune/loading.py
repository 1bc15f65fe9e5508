"""Can this host feed the step, and what was measured to help: one sentence for page, terminal and `tune`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vivace import registry
from vivace.ledger import Ratio, Trial
from vivace.report import words
from vivace.technique import Stage


def sentence(limit: object, trials: Iterable[Trial]) -> str:
    """The limit of loading as it was seen before the search, and what was faster, the most gain first.

    A technique helped where a plan was faster with it than without, beyond both intervals. Empty where
    loading was no limit.
    """
    if not limit:
        return ""
    feeding = {cls.name for cls in registry.everything() if cls.card.stage == Stage.DATA}
    plans = [(trial.techniques, trial.ratio) for trial in trials if trial.ratio is not None]
    ratios = {_key(techniques): ratio for techniques, ratio in plans}  # the later one is the confirmation
    ratios[_key({})] = Ratio(1.0, 1.0, 1.0)
    gains: dict[str, float] = {}
    for techniques, _ in plans:
        for name in feeding & set(techniques):
            rest = {other: settings for other, settings in techniques.items() if other != name}
            found, without = ratios[_key(techniques)], ratios.get(_key(rest))
            if without is not None:
                gain = found.estimate / without.estimate if found.low > without.high else 0.0
                shown = words.plan_name({name: techniques[name]})
                gains[shown] = max(gains.get(shown, 0.0), gain)
    helped = sorted(((gain, name) for name, gain in gains.items() if gain), reverse=True)
    if helped:
        told = "measured to help: " + ", ".join(f"{name} {words.times(gain)}" for gain, name in helped)
    elif gains:
        told = "none of what was measured against it was faster"
    else:
        told = "nothing against it was measured by itself"
    return f"{limit}; {told}"


def _key(techniques: Mapping[str, Any]) -> str:
    return repr(sorted((name, sorted(settings.items())) for name, settings in techniques.items()))
