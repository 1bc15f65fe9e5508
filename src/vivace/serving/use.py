"""What a metric makes of a model's outputs: whether it uses them, which, and whether right ones are better.

The metric alone decides whether a form in other numbers may be deployed. One that says the same whatever the
model returns, or more where answers are wrong, would let any form pass. So it is asked again of outputs that
were spoilt on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import mean, stdev
from typing import Any

import numpy

from vivace.errors import JobError, Refused
from vivace.words import number, percent

Array = numpy.ndarray[Any, Any]
Outputs = Sequence[Sequence[Array]]
Ask = Callable[[Outputs], float]

SWAPS = 5  # how often answers are given to other samples
SURE = 6.0  # standard deviations of these
FEWEST = 20  # samples: with fewer, chance makes the metric of swapped answers better
MOST_LABELS = 100
ASTRAY = 0.5  # of an output's spread: three quarters of its variance are then still the model's


def require_use(ask: Ask, outputs: Outputs, metric: float, name: str) -> list[int]:
    """The places of outputs on which the metric does not depend. Raises Refused where it depends on none, or
    is better where answers are given to the wrong samples.

    `ask` is the metric of outputs, `metric` that of these, `name` what it is called.
    """
    if not _uses(ask, outputs, metric, range(len(outputs[0]))):
        raise Refused(
            f"the job's {name} is {number(metric)} whatever the model returns: let metric(model, batches) "
            "judge what model(...) returns, as it alone tells what a form loses"
        )
    _require_higher_is_better(ask, outputs, metric, name)
    return _unused(ask, outputs, metric)


def _unused(ask: Ask, outputs: Outputs, metric: float) -> list[int]:
    """Of outputs that it uses together: halves that it does not use are not looked at one by one."""

    def within(places: list[int]) -> list[int]:
        if not _uses(ask, outputs, metric, places):
            return places
        middle = len(places) // 2
        return within(places[:middle]) + within(places[middle:]) if middle else []

    count = len(outputs[0])
    if count == 1:
        return []
    found = within(list(range(count // 2))) + within(list(range(count // 2, count)))
    return found if len(found) < count else []  # one says what another does


def _require_higher_is_better(ask: Ask, outputs: Outputs, metric: float, name: str) -> None:
    swapped: list[float] = []
    try:
        for shift in range(1, SWAPS + 1):
            swapped.append(ask(_swapped(outputs, shift)))
            if swapped[-1] <= metric:
                return
    except (JobError, Refused):  # it cannot be told of another sample's answers
        return
    samples = sum(max((len(one) for one in arrays if one.ndim), default=1) for arrays in outputs)
    largest = max(abs(metric), *map(abs, swapped))
    spread = max(stdev(swapped), 0.5 * largest / math.sqrt(samples))
    if samples >= FEWEST and mean(swapped) - metric > SURE * spread:
        raise Refused(
            f"the job's {name} is {number(metric)}, and {number(mean(swapped))} where each sample has the "
            "answer of another: a higher metric must be better, so let it return an error times -1"
        )


def astray(checks: Sequence[dict[str, Any]], places: Sequence[int]) -> str:
    """Which of the outputs that the metric does not use is another than the model's; empty where none is.

    `checks` are those of all outputs, of `vivace.serving.envelope.Check`.
    """
    found = next((checks[place] for place in places if checks[place]["share"] > ASTRAY), None)
    return f"the metric does not use {_told(found)}" if found is not None else ""


def unjudged(checks: Sequence[dict[str, Any]], places: Sequence[int]) -> str:
    """Which outputs the metric does not use, and how far off they are; empty where it uses all."""
    told = " and ".join(_told(checks[place]) for place in places if place < len(checks))
    return f"the metric does not use {told}" if told else ""


def _told(check: dict[str, Any]) -> str:
    return f"'{check['output']}', which is off by {percent(check.get('share'))} of its spread"


def _uses(ask: Ask, outputs: Outputs, metric: float, places: Sequence[int]) -> bool:
    """Does the metric change, or fail, where the outputs at these places are spoilt?"""
    for spoil in (_opposite, _other_side, _nothing):
        spoilt = [
            [numpy.asarray(spoil(one)) if place in places else one for place, one in enumerate(arrays)]
            for arrays in outputs
        ]
        try:
            if _differs(ask(spoilt), metric):
                return True
        except (JobError, Refused):
            return True
    swapped = _swapped(outputs, 1)
    try:
        both = zip(swapped, outputs, strict=True)
        mixed = [[new[k] if k in places else own[k] for k in range(len(own))] for new, own in both]
        return _differs(ask(mixed), metric)
    except (JobError, Refused):
        return True


def _differs(one: float, other: float) -> bool:
    return not math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-12)


def _opposite(one: Array) -> Array:
    """Other signs, and other zeros."""
    return ~one if one.dtype == bool else (-one - 1).astype(one.dtype)


def _other_side(one: Array) -> Array:
    """What is a probability becomes that of the opposite; a label becomes another."""
    return ~one if one.dtype == bool else (1 - one).astype(one.dtype)


def _nothing(one: Array) -> Array:
    """No number where there may be none, else all numbers in turn."""
    if numpy.issubdtype(one.dtype, numpy.inexact):
        return numpy.full_like(one, numpy.nan)
    return (numpy.arange(one.size) % MOST_LABELS).reshape(one.shape).astype(one.dtype)


def _swapped(outputs: Outputs, shift: int) -> list[list[Array]]:
    """Each sample's answers to another: those of another call where that has as many, in another order."""
    found = []
    for place, arrays in enumerate(outputs):
        other = outputs[(place + shift) % len(outputs)]
        alike = [a.shape for a in arrays] == [b.shape for b in other]
        found.append([numpy.roll(one, shift, 0) if one.ndim else one for one in (other if alike else arrays)])
    return found
