"""Does an edited training measure what the original does? The two metrics of the same weights on the same
batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from vivace.errors import JobError
from vivace.job import Job
from vivace.session.session import Session
from vivace.tensors.trees import batch_size, bytes_of, tensors
from vivace.training.evaluation import Evaluation
from vivace.verifying.displacement import State
from vivace.verifying.figures import Measure, Quantity
from vivace.verifying.judgement import LIMIT, figure_of, root_mean_square
from vivace.verifying.states import clone, load_state

MOST_BYTES = 2**26  # of batches
FEWEST_BATCHES = 2
SHADOWS = 8
SAME = 1e-5  # relative: sums of fp32 numbers in another order


class Measured(NamedTuple):
    """A job's metric of some weights over its first `batches`, which hold so many `samples`."""

    value: float
    batches: int
    samples: int


class OwnMeasure:
    """A job's own metric of the model of a session, on the first batches that it is evaluated on: `most` of
    them, or as many as `seconds` of reading and some memory hold.
    """

    def __init__(self, job: Job, session: Session, most: int, seconds: float) -> None:
        self.job, self.most, self.seconds = job, max(FEWEST_BATCHES, most), seconds
        self.evaluation = Evaluation(job, session, 0, self._firsts)
        self.batches: list[Any] = []

    def __call__(
        self, state: State, seed: int = 0, around: AbstractContextManager[Any] | None = None
    ) -> Measured | None:
        """The metric of the model in this state; None where there is none, or so few batches say nothing."""
        if self.job.metric is None:
            return None
        load_state(self.evaluation.session, state)
        self.evaluation.seed = seed
        try:
            with around or nullcontext():
                value = self.evaluation.metric()
        except JobError:
            return None
        return Measured(value, len(self.batches), sum(batch_size(batch) for batch in self.batches))

    def _firsts(self, loader: Iterable[Any]) -> list[Any]:
        if not self.batches:
            deadline, num_bytes = time.perf_counter() + self.seconds, 0
            for batch in (one for one in loader if one is not None):
                self.batches.append(batch)
                num_bytes += bytes_of(tensors(batch))
                late = time.perf_counter() > deadline or num_bytes > MOST_BYTES
                if len(self.batches) >= (FEWEST_BATCHES if late else self.most):
                    break
        return [clone(batch) for batch in self.batches]


def other(mine: Measured | None, theirs: Measured | None, whose: str) -> str:
    """What is otherwise where every output is bit-identical; empty where nothing is."""
    if mine is None or theirs is None or _gap(mine, theirs) <= SAME * abs(theirs.value):
        return ""
    return (
        f"its metric is {mine.value:.6g} instead of {theirs.value:.6g} in {whose}, of the same weights "
        f"on the same {theirs.batches} batches"
    )


def check_of(mine: Measured, theirs: Measured, shadows: list[Measured]) -> dict[str, Any]:
    """The figure where outputs may round otherwise: what shadows make of the metric, or one sample of a share
    is no difference.
    """
    spread = root_mean_square([_gap(shadow, theirs) for shadow in shadows]) if shadows else 0.0
    sample = 1.0 / theirs.samples if theirs.samples and 0.0 <= theirs.value <= 1.0 else 0.0
    envelope = max(spread, sample / LIMIT, SAME * abs(theirs.value), 1e-12)
    gap = _gap(mine, theirs)
    envelope = envelope if math.isfinite(envelope) else math.nan
    figure = figure_of(Measure(Quantity.METRIC), None, gap, envelope, gap / envelope, LIMIT)
    return figure | {"step": 0}


def _gap(mine: Measured, theirs: Measured) -> float:
    return abs(mine.value - theirs.value)
