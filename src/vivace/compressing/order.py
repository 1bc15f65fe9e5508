"""Which form to try next: what forms have in common lets the first results teach where the others lie.

The logarithm of each form's speed is taken as normal before anything is measured, and forms that share a
runtime or a number format as correlated; what is measured moves the others (a Gaussian process over so many
points). Tried next is what promises the largest gain over the best, for the time that it takes (expected
improvement: Jones, Schonlau & Welch, Journal of Global Optimization 13, 1998). A form that promises too
little for its time is passed over. Pure: it starts nothing, and knows forms and ratios alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy

from vivace.ledger import Ratio
from vivace.serving.forms import Form

# Before anything is measured: how many times as fast as eager fp32, and the seconds that making, opening,
# timing and judging take. Guesses from a dozen networks; and the speeds that were others on a processor
# without matrix units, of the five networks of `scripts/bench compress` (records/compress_*).
EXPECTED = {
    "openvino_fp32": (2.8, 20.0),
    "onnx_fp32": (2.5, 18.0),
    "folded_fp32": (1.1, 12.0),
    "compiled_fp32": (1.4, 30.0),
    "aoti_fp32": (1.6, 45.0),
    "openvino_bf16": (4.5, 15.0),
    "eager_bf16": (1.4, 12.0),
    "folded_bf16": (1.6, 12.0),
    "compiled_bf16": (2.0, 35.0),
    "aoti_bf16": (2.0, 45.0),
    "openvino_int8": (5.0, 30.0),
    "onnx_int8": (4.0, 22.0),
    "compiled_int8": (3.0, 60.0),
    "torchao_int8": (0.8, 35.0),
    "torchao_int8_weights": (0.8, 30.0),
}
WITHOUT_MATRIX_UNITS = {
    "openvino_bf16": 2.4,
    "eager_bf16": 0.8,
    "folded_bf16": 0.9,
    "compiled_bf16": 1.2,
    "aoti_bf16": 1.1,
    "openvino_int8": 4.4,
    "onnx_int8": 3.5,
    "compiled_int8": 1.9,
}
FAMILIES = {"inductor": "compiled", "aoti": "compiled"}
# Standard deviations of the logarithm: of the model as a whole, of what forms of one family or one number
# format share, of a form alone; and of a measurement.
WHOLE, RUNTIME, NUMBERS, OWN, MEASURED = 0.45, 0.35, 0.35, 0.22, 0.02
# A form is passed over that promises less than this (as a logarithm), times its share of the seconds of all:
# one that takes a tenth of them must promise 4 %.
WORTH = 0.4
_NORMAL = NormalDist()


class Order:
    """Forms that wait, and what is known of them. `every`: none is passed over. `matrix_units`: does the
    processor multiply bfloat16 and int8 in them (AMX)?
    """

    def __init__(self, forms: Sequence[Form], *, every: bool = False, matrix_units: bool = True) -> None:
        self.forms, self.every = {form.name: form for form in forms}, every
        self.waiting = list(self.forms)
        self._names = list(self.forms)
        slower = {} if matrix_units else WITHOUT_MATRIX_UNITS
        self._means = numpy.log([slower.get(name, EXPECTED[name][0]) for name in self._names])
        self._known: dict[str, float] = {}
        self._spent: list[tuple[float, float]] = []  # expected, and as it was
        self._kept: dict[str, float] = {}  # the speeds of forms that may be deployed

    def tell(self, name: str, ratio: Ratio | None, *, kept: bool, seconds: float = 0.0) -> None:
        """A form was tried, or tried again. `ratio` is None where it was not timed; `kept`: it may be
        deployed.
        """
        if name in self.waiting:
            self.waiting.remove(name)
        if seconds:
            self._spent.append((EXPECTED[name][1], seconds))
        self._kept.pop(name, None)
        if ratio is None:
            return
        self._known[name] = math.log(ratio.estimate)
        if kept:
            self._kept[name] = ratio.counts

    @property
    def best(self) -> float:
        """The speed of the best form that may be deployed; 0 where there is none."""
        return max(self._kept.values(), default=0.0)

    def ask(self, seconds: float = math.inf) -> Form | None:
        """The form to try next of those that can be done in so many seconds; None where none is worth it.

        The first is one in the model's own numbers: the same on a better runtime.
        """
        affordable = [name for name in self.worth_it() if self.seconds_of(name) <= seconds]
        same = [name for name in affordable if self.forms[name].exact]
        if same and not self._known:
            affordable = same
        if not affordable:
            return None
        return self.forms[max(affordable, key=lambda name: self._improvement(name) / self.seconds_of(name))]

    def worth_it(self) -> list[str]:
        """The waiting forms that promise enough over the best for the time that they take."""
        return [name for name in self.waiting if self.every or self._is_worth_it(name)]

    def seconds_of(self, name: str) -> float:
        """What trying a form takes, by what the others took."""
        scale = (60.0 + sum(took for _, took in self._spent)) / (60.0 + sum(said for said, _ in self._spent))
        return EXPECTED[name][1] * scale

    def left_seconds(self) -> float:
        """What trying all that are worth it takes."""
        return sum(map(self.seconds_of, self.worth_it()))

    def expected(self, name: str) -> Ratio:
        """How fast a form is thought to be, with its 95 % interval."""
        mean, deviation = self._belief(name)
        low, high = mean - 1.96 * deviation, mean + 1.96 * deviation
        return Ratio(math.exp(mean), math.exp(low), math.exp(high))

    def _is_worth_it(self, name: str) -> bool:
        if not self.best:
            return True
        share = EXPECTED[name][1] / sum(EXPECTED[each][1] for each in self.forms)
        return self._improvement(name) >= WORTH * share

    def _improvement(self, name: str) -> float:
        """What the logarithm of the best gains by this form, on average."""
        mean, deviation = self._belief(name)
        above = (mean - math.log(max(1.0, self.best))) / deviation
        return deviation * (above * _NORMAL.cdf(above) + _NORMAL.pdf(above))

    def _belief(self, name: str) -> tuple[float, float]:
        """Mean and standard deviation of the logarithm of a form's speed, given what was measured."""
        place, known = self._names.index(name), [self._names.index(one) for one in self._known]
        mean, variance = float(self._means[place]), self._shared(name, name)
        if known:
            within = numpy.array([[self._shared(a, b) for b in self._known] for a in self._known])
            within += MEASURED**2 * numpy.eye(len(known))
            across = numpy.array([self._shared(name, one) for one in self._known])
            weights = numpy.linalg.solve(within, across)
            mean += float(weights @ (numpy.array(list(self._known.values())) - self._means[known]))
            variance -= float(weights @ across)
        return mean, math.sqrt(max(variance, MEASURED**2))

    def _shared(self, one: str, other: str) -> float:
        """The covariance of two forms."""
        a, b = self.forms[one], self.forms[other]
        same_family = FAMILIES.get(a.runtime, a.runtime) == FAMILIES.get(b.runtime, b.runtime)
        found = WHOLE**2 + RUNTIME**2 * same_family + NUMBERS**2 * (a.numbers == b.numbers)
        return found + OWN**2 * (one == other)
