"""From a step and its repetitions to a finding: figures, envelopes, the worst of them."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict, deque
from typing import Any, Protocol

from vivace.verifying.figures import Measure
from vivace.verifying.judgement import LIMIT, SHADOW, check, root_mean_square

MOST_SHADOWS = 16
# A real plan rounds the same weights alike at each product: single steps of right plans were seen up to 7.3
# of `verify`'s 8 envelopes off.
STEP_LIMIT = 2 * LIMIT
# A rare event, such as a ReLU that flips for one sample of a small batch, may be a hundred envelopes off and
# is still a small part of the update. So one step alone proves a fault only where it is gross, too.
OUTRIGHT, GROSS = 4 * STEP_LIMIT, 0.3


@dataclasses.dataclass(frozen=True)
class Finding:
    """What is known of one watched step.

    `kept`: None where it cannot be judged. `score` in envelopes, of which `STEP_LIMIT` are allowed; `figure`
    is the worst one. `fault` says in a sentence what is broken, or why that cannot be judged; `outright`,
    that this step alone proves it.
    """

    kept: bool | None
    score: float = 0.0
    figure: str = ""
    fault: str = ""
    shadows: int = 0
    outright: bool = True

    @property
    def clear(self) -> bool:
        """Was it judged, and is it far enough below the limit?"""
        return self.kept is not None and self.score <= LIMIT


class Envelopes:
    """The figures of the last shadows of a run, by measure.

    What rounding does to a step changes slowly over a training, so the steps watched before help to judge the
    next one.
    """

    def __init__(self) -> None:
        self._figures: dict[Measure, deque[float]] = defaultdict(lambda: deque(maxlen=MOST_SHADOWS))
        self.num = 0

    def add(self, figures: dict[Measure, float]) -> None:
        """The distances of one more shadow from its reference."""
        self.num += 1
        for measure, value in figures.items():
            self._figures[measure].append(value)

    def of(self, measure: Measure) -> float:
        """The root mean square of a figure; NaN where no shadow has it, or one is not finite."""
        values = list(self._figures.get(measure, ()))
        found = root_mean_square(values) if values else math.nan
        return found if math.isfinite(found) else math.nan


class Known(Protocol):
    """What is known of how far rounding moves a step."""

    @property
    def num(self) -> int:
        """From how many shadows the envelopes are known."""

    def of(self, measure: Measure) -> float:
        """The envelope of a figure; NaN where it is not known."""


def judged(
    figures: dict[Measure, float], envelopes: Known, smallest: dict[Measure, float], roundoff: float
) -> Finding:
    """The finding on a step whose distances from the reference are `figures`."""
    checks: list[dict[str, Any]] = []
    for measure, value in figures.items():
        envelope = envelopes.of(measure)
        floor = max(envelope, smallest.get(measure, 0.0))
        checks.append(check(measure, 0, value, floor, roundoff) | {"of": str(measure)})
        if math.isnan(envelope):
            checks[-1] |= {"score": None, "kept": None}
    unknown = Finding(None, fault=f"it cannot be judged: {SHADOW}, is not finite", shadows=envelopes.num)
    known = [c for c in checks if c["kept"] is not None]
    if not known:
        return unknown
    worst = max(known, key=lambda c: c["score"] / c["limit"])
    score, name = worst["score"] * LIMIT / worst["limit"], worst["of"]
    if score <= STEP_LIMIT:
        return Finding(True, score, name, shadows=envelopes.num) if len(known) == len(checks) else unknown
    layers = [c for c in known if c["layer"]]
    layer = max(layers, key=lambda c: c["score"] / c["limit"], default=worst)["of"]
    where = f", most in the {layer}" if layer != name else ""
    text = f"the {name} is {score:.3g} envelopes off{where}, and rounding explains {STEP_LIMIT:.0f}"
    far = (c for c in known if c["score"] * LIMIT / c["limit"] > OUTRIGHT)
    return Finding(False, score, name, text, envelopes.num, any(abs(c["value"]) >= GROSS for c in far))
