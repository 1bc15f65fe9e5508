"""What a verdict's figures are of: one quantity each, over the whole model or of one layer."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Quantity(enum.StrEnum):
    """What is compared, as it is told."""

    LOSS = "loss"
    LOSS_CURVE = "loss curve"
    GRADIENT_SCALE = "gradient scale"
    GRADIENT_RESIDUAL = "gradient residual"
    SCALE = "scale"
    RESIDUAL = "residual"
    DECAY = "decay"
    SHRINKING = "shrinking"  # the same, of a training without weight decay
    BUFFER = "buffer"
    EVALUATION = "evaluation"
    OUTPUT = "output"
    OUTPUT_SCALE = "output scale"
    EVALUATION_UNDER_PLAN = "evaluation under the plan"
    SPREAD = "spread over random streams"
    COURSE = "displacement of the course"
    DICTATED_LOSS = "dictated loss"
    DICTATED_SCALE = "dictated scale"
    DICTATED_RESIDUAL = "dictated residual"
    DICTATED_AVERAGES = "dictated averages"
    FACTS = "facts"
    BITS = "bit-identical"
    DRAWS = "random numbers drawn"
    LOSS_BIAS = "loss bias"
    GRADIENT_BIAS = "gradient bias"
    GRADIENT_SIZE = "gradient size"
    GRADIENT_DRIFT = "gradient drift"
    GRADIENT_NOISE = "gradient noise"
    GRADIENT_SPREAD = "gradient spread"
    INITIAL = "initial value"
    METRIC = "metric of the same weights"


LOSSES = (Quantity.LOSS, Quantity.LOSS_CURVE)
GRADIENTS = (Quantity.GRADIENT_SCALE, Quantity.GRADIENT_RESIDUAL)
DICTATED = tuple(quantity for quantity in Quantity if quantity.startswith("dictated"))


class Measure(NamedTuple):
    """A quantity, of a parameter or buffer or (empty) of the whole model; `moment`: when in a rehearsal."""

    quantity: Quantity
    layer: str = ""
    moment: str = ""

    def __str__(self) -> str:
        between = " " if self.quantity == Quantity.BUFFER else " of "
        layer = between + self.layer if self.layer else ""
        return f"{self.quantity}{layer}{', ' if self.moment else ''}{self.moment}"
