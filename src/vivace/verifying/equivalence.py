"""Equivalence by metric: reference and plan trained to the end, seed by seed, within a margin."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy

from vivace.errors import JobError
from vivace.job import Job
from vivace.plan import Plan
from vivace.processes.launch import Child, Source
from vivace.verifying.verdict import Verdict

DEFAULT_MARGIN = 0.005  # of the reference's mean metric
SIGNIFICANCE = 0.05
TRAINER = "vivace.verifying.equivalence:Trainer"


class Trainer:
    """Serves `vivace.processes.launch.Child`: trains the job to the end and returns its metric."""

    def __init__(self, job: Job) -> None:
        if job.metric is None:
            raise JobError(
                "the Job has no metric: an equivalence test needs metric=(model, batches) -> float"
            )
        self.job = job

    def train(self, plan: dict[str, Any], seed: int) -> float:
        """The metric after all epochs under one seed. Raises JobError where it is not a finite number."""
        from vivace.training.training import train  # imports torch, which the parent does without

        with tempfile.TemporaryDirectory(prefix="vivace-") as folder:
            run = train(self.job, Plan.from_dict(plan), out=Path(folder, "run"), seed=seed)
        if run.metric is None or not math.isfinite(run.metric):
            raise JobError(f"the Job's metric is {run.metric} after training with seed {seed}")
        return run.metric

    def metric_data(self) -> str | None:
        """What data the metric is of: ``validation`` or ``training``."""
        return self.job.metric_data


def judge_by_metric(
    source: Source,
    plan: Plan,
    verdict: Verdict,
    *,
    seeds: int,
    margin: float | None,
    original: Source | None = None,
) -> Verdict:
    """Two one-sided tests (TOST, Schuirmann 1987) on the differences of the metric, paired by seed.

    `verdict` is what lockstep said; it stands beside the metric's answer, and for a plan that promises
    SEMANTICS the metric alone decides. `margin` in units of the metric; default: half a percent of the
    reference's mean.
    """
    hours = 24 * 3600.0
    with Child(TRAINER, source) as mine, Child(TRAINER, original or source) as theirs:
        reference = [theirs.ask("train", hours, plan={}, seed=seed) for seed in range(seeds)]
        candidate = [mine.ask("train", hours, plan=plan.to_dict(), seed=seed) for seed in range(seeds)]
        data = theirs.ask("metric_data", hours)
    width = DEFAULT_MARGIN * abs(mean(reference)) if margin is None else margin
    difference = [b - a for a, b in zip(reference, candidate, strict=True)]
    p = equivalence_p(difference, width)
    equivalent = p < SIGNIFICANCE
    name = "metric on the training data" if data == "training" else "metric"
    text = (
        f"{name} {mean(candidate):.4g} against {mean(reference):.4g}, difference {mean(difference):+.2g} "
        f"within a margin of {width:.2g}: p = {p:.2g}, n = {seeds}"
    )
    only_metric = verdict.promise == "semantics"
    kept = equivalent and (only_metric or verdict.kept)
    reason = "; ".join(filter(None, ("" if only_metric else verdict.reason, text)))
    checks = () if only_metric else verdict.checks
    document = {
        "reference": reference,
        "plan": candidate,
        "margin": width,
        "p": p,
        "n": seeds,
        "kept": equivalent,
        "data": data,
    }
    return dataclasses.replace(verdict, kept=kept, reason=reason, checks=checks, metric=document)


def equivalence_p(differences: Sequence[float], margin: float) -> float:
    """The p value of at least two `differences` having a mean within ±`margin`; small means equivalent."""
    count, center = len(differences), mean(differences)
    error = stdev(differences) / math.sqrt(count)
    if error == 0.0:
        return 0.0 if abs(center) < margin else 1.0
    return max(
        _upper_tail((margin + center) / error, count - 1), _upper_tail((margin - center) / error, count - 1)
    )


def _upper_tail(t: float, freedom: int) -> float:
    """P(T > t) of Student's t, by Simpson's rule over the angle whose tangent is t / sqrt(freedom)."""
    angles = numpy.linspace(math.atan(t / math.sqrt(freedom)), math.pi / 2, 2001)
    heights = numpy.cos(angles) ** (freedom - 1)
    weights = numpy.ones(2001)
    weights[1:-1:2], weights[2:-1:2] = 4.0, 2.0
    area = float((weights * heights).sum() * (angles[1] - angles[0]) / 3.0)
    constant = math.gamma((freedom + 1) / 2) / (math.sqrt(math.pi) * math.gamma(freedom / 2))
    return min(1.0, constant * area)
