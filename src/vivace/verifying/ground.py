"""What the ruler holds a plan against, and what it noted of the plan."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from vivace.plan import Plan
from vivace.verifying.bias import Estimate
from vivace.verifying.displacement import Outcome, State
from vivace.verifying.figures import Measure
from vivace.verifying.life import Course, Life
from vivace.verifying.measured import Measured
from vivace.verifying.rehearsal import Rehearsal


@dataclasses.dataclass
class Ground:
    """What a plan is held against: the reference's outcomes and course, and an envelope for each distance."""

    references: list[Outcome]
    envelopes: list[dict[Measure, float]]
    curve: list[float]
    end: State
    widths: list[float]
    end_envelope: float
    life: Outcome
    life_envelopes: dict[Measure, float]
    biases: dict[Measure, float]


@dataclasses.dataclass
class Standing:
    """The reference's runs under the circumstances in which a plan is judged: `grounds` by unit roundoff, by
    whether random streams are the same, and by the id of the part of the plan that lowers precision. `lived`:
    what its life brought.
    """

    references: list[Outcome]
    curve: list[float]
    end: State
    rehearsal: Rehearsal | None = None
    life: Life | None = None
    lived: Course | None = None
    grounds: dict[tuple[float, bool, str], Ground] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Ran:
    """What a plan's session did. `fault` is a plain one, which ends it; `last`: before closing; `notes`: what
    could not be compared; `details`, `fed`: see `Verdict`; `handed`: biases where the reference got the
    plan's masks; `measured`: the job's own metric, where there is no other evaluation; `num_pairs`: of
    gradients for the bias; `long_curve`: the losses of many more steps, if an
    edit's first ones were equal.
    """

    outcomes: list[Outcome] = dataclasses.field(default_factory=list)
    curve: list[float] = dataclasses.field(default_factory=list)
    long_curve: list[float] = dataclasses.field(default_factory=list)
    end: State = dataclasses.field(default_factory=lambda: State({}, {}))
    last: State = dataclasses.field(default_factory=lambda: State({}, {}))
    rehearsal: Rehearsal | None = None
    life: Life | None = None
    biases: dict[Measure, Estimate] = dataclasses.field(default_factory=dict)
    handed: dict[Measure, Estimate] = dataclasses.field(default_factory=dict)
    evaluated: list[torch.Tensor] = dataclasses.field(default_factory=list)
    measured: list[Measured | None] = dataclasses.field(default_factory=list)
    precision: Plan = dataclasses.field(default_factory=Plan)
    num_pairs: int = 0
    same_streams: bool = True
    silent: bool = False
    notes: list[str] = dataclasses.field(default_factory=list)
    details: list[str] = dataclasses.field(default_factory=list)
    fed: dict[str, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    fault: str = ""

    def ended(self, fault: str) -> Ran:
        """This run, marked with the fault that ended it."""
        self.fault = fault
        return self
