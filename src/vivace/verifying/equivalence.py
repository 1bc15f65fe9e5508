"""Equivalence by metric: reference and plan trained to the end, seed by seed, within a margin."""

from __future__ import annotations

import dataclasses
import itertools
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy

from vivace.errors import InputError, JobError
from vivace.events import Tell, metric_title
from vivace.job import Job
from vivace.plan import Plan
from vivace.processes.launch import Child, Source
from vivace.training.crew import ALONE, Company
from vivace.verifying.verdict import Verdict

DEFAULT_MARGIN = 0.005  # as a share of what training gains in the metric
SMALLEST_GAIN = 1e-3  # of the metric: training that gains less has not learnt
FIRST_LOOK = 3  # pairs of runs before the first test
MOST_NEEDED = 1000  # seeds; a number above it is not told
SIGNIFICANCE = 0.05
FINEST_STEP = 1e-6  # of a metric, relative: what is finer is rounding
TINY = 1e-12
TIMEOUT_SECONDS = 24 * 3600.0  # of one training
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

    def untrained(self) -> float:
        """The metric of the weights with which training begins."""
        from vivace.inspection import inspect
        from vivace.session.opening import start
        from vivace.training.evaluation import Evaluation

        with start(self.job, Plan(), inspect()) as session:
            return Evaluation(self.job, session, 0).metric()

    def metric_facts(self) -> dict[str, str | None]:
        """The metric's ``name``, and of what ``data`` it is: ``validation`` or ``training``."""
        return {"name": self.job.metric_name, "data": self.job.metric_data}


@dataclasses.dataclass
class Pairs:
    """The metric of the original and of the plan, seed by seed, and what they prove so far.

    Looked at after the third pair and each later one, at most `most` in all; the looks share the error that
    is allowed, half of it for the last, so that going on until it is decided does not make an error likelier.
    """

    margin: float
    most: int
    reference: list[float] = dataclasses.field(default_factory=list)
    candidate: list[float] = dataclasses.field(default_factory=list)
    same_bits: bool = False  # were the trainings compared bit for bit? Then equal metrics are no chance

    @property
    def step(self) -> float:
        """In which the metric moves, as one of few samples moves an accuracy, where that hides a margin."""
        step = 0.0 if self.same_bits else _step_of([*self.reference, *self.candidate])
        return step if step > self.margin else 0.0

    @property
    def p(self) -> float:
        """The p value of the metrics being equivalent."""
        return equivalence_p(self.differences, self.margin, self.step)

    @property
    def differences(self) -> list[float]:
        """Of the plan from the original."""
        return [b - a for a, b in zip(self.reference, self.candidate, strict=False)]

    @property
    def level(self) -> float:
        """The error that this look may make."""
        looks = max(0, self.most - FIRST_LOOK)
        if not looks:
            return SIGNIFICANCE
        return SIGNIFICANCE / 2 / (1 if len(self.differences) >= self.most else looks)

    def decision(self) -> bool | None:
        """Equivalent, not so, or (None) not decided yet."""
        differences = self.differences
        if len(differences) < min(FIRST_LOOK, self.most) or self.stuck:
            return None
        if self.p < self.level:
            return True
        return False if _other_p(differences, self.margin) < self.level else None

    @property
    def stuck(self) -> str:
        """Why the metric can prove nothing: it, or its difference, is the same whatever the seed."""
        differences = self.differences
        if len(differences) > 1 and len({*self.reference, *self.candidate}) == 1:
            return f"the metric is {self.reference[0]:.4g} whatever the seed, so it can tell nothing apart"
        if len(differences) > 1 and any(differences) and len(set(differences)) == 1:
            return "all differences are equal, so their spread is unknown"
        return ""

    def needed(self) -> int | None:
        """About so many seeds would decide, with a chance of 80 %; None where no number is in sight."""
        differences = self.differences
        if len(differences) < 2 or self.stuck:
            return None
        if self.step and not any(differences):
            share = max(self.margin / self.step, TINY)
            seeds = math.ceil(math.log(SIGNIFICANCE / 2) / math.log1p(-share))
            return seeds if seeds <= MOST_NEEDED else None
        center, spread = abs(mean(differences)), stdev(differences)
        way = self.margin - (center if center > 2 * spread / math.sqrt(len(differences)) else 0.0)
        quantiles = 2.93 if way > 0 else 2.49  # of the normal distribution: 95 % + 90 %, and 95 % + 80 %
        way = self.margin if way > 0 else -way
        seeds = math.ceil((quantiles * spread / way) ** 2) + 2 if way else MOST_NEEDED + 1
        return max(seeds, len(differences) + 1) if seeds <= MOST_NEEDED else None

    def undecided(self, why: str) -> str:
        """The third answer, as a sentence."""
        if self.stuck:
            return f"not decided: {self.stuck}"
        needed = self.needed()
        told = f"about {needed} seeds would decide" if needed else f"more than {MOST_NEEDED} seeds are needed"
        if self.step:
            told += (
                f"; the metric moves in steps of {self.step:.2g}, so more validation data or a wider margin "
                "needs fewer"
            )
        return f"not decided{why}: {told}" if len(self.differences) > 1 else f"not decided{why}"


def require_metric(source: Source) -> None:
    """Raises JobError where the job has no metric, before anything is run for it."""
    with Child(TRAINER, source, environment=ALONE) as child:
        child.ask("metric_facts", TIMEOUT_SECONDS)


def judge_by_metric(
    company: Company,
    plan: Plan,
    verdict: Verdict,
    *,
    seeds: int,
    margin: float | None,
    original: Source | None = None,
    seconds: float = math.inf,
    tell: Tell = lambda kind, payload: None,
) -> Verdict:
    """Two one-sided tests (TOST, Schuirmann 1987) on the differences of the metric, paired by seed.

    Seed by seed until it is decided, at most `seeds`, and no pair more than fits into `seconds`. `verdict` is
    what lockstep said; it stands beside the metric's answer, and for a plan that promises SEMANTICS the
    metric alone decides. `margin` in units of the metric; default: half a percent of what training brings.
    Several ranks of a `company` train together under the plan, the original trains in one process.
    `tell` is told ``("seed", {"n", "seeds", "reference", "plan", "name", "left_seconds"})`` after each pair.

    Ctrl-C ends it with what the finished pairs say, and with `verdict` where there are none; where that says
    nothing either, it raises KeyboardInterrupt. Raises InputError where no margin can be derived.
    """
    begin, why, interrupted = time.monotonic(), "", False
    pairs = Pairs(margin or 0.0, seeds, same_bits=verdict.promise == "exact" and verdict.kept is True)
    own = original or company.source
    with company.child(TRAINER) as mine, Child(TRAINER, own, environment=ALONE) as theirs:
        metric = theirs.ask("metric_facts", TIMEOUT_SECONDS)
        try:
            for seed in range(seeds):
                pairs.reference.append(theirs.ask("train", TIMEOUT_SECONDS, plan={}, seed=seed))
                if margin is None and seed == 0:
                    untrained = theirs.ask("untrained", TIMEOUT_SECONDS)
                    pairs.margin = _derived_margin(untrained, pairs.reference[0])
                pairs.candidate.append(mine.ask("train", TIMEOUT_SECONDS, plan=plan.to_dict(), seed=seed))
                each = (time.monotonic() - begin) / (seed + 1)
                tell(
                    "seed",
                    {
                        "n": seed + 1,
                        "seeds": seeds,
                        "reference": pairs.reference[-1],
                        "plan": pairs.candidate[-1],
                        "name": metric["name"],
                        "left_seconds": each * (seeds - seed - 1),
                    },
                )
                if pairs.decision() is not None:
                    break
                if seed + 1 < seeds and each * (seed + 2) > seconds:
                    why = f" in the time given, with {seed + 1} of {seeds} seeds"
                    break
        except KeyboardInterrupt:
            why = f", as it was interrupted after {len(pairs.candidate)} of {seeds} seeds"
            interrupted = True
            if not (pairs.candidate or verdict.num_checks):
                raise
    return _with_metric(verdict, pairs, why, metric, interrupted=interrupted)


def _with_metric(
    verdict: Verdict, pairs: Pairs, why: str, metric: dict[str, str | None], *, interrupted: bool
) -> Verdict:
    count = len(pairs.candidate)
    differences, decision = pairs.differences, pairs.decision()
    p = pairs.p if count > 1 else 1.0
    name = metric_title({"metric_name": metric["name"], "metric_data": metric["data"]})
    told = (
        f"{name} {mean(pairs.candidate):.4g} against {mean(pairs.reference[:count]):.4g}, difference "
        f"{mean(differences):+.2g} within a margin of {pairs.margin:.2g}: p = {p:.2g}, n = {count}"
        if count
        else f"{name} was not compared"
    )
    text = told if decision is not None else f"{pairs.undecided(why)} ({told})"
    only_metric = verdict.promise == "semantics"
    answers = [decision] if only_metric else [decision, verdict.kept]
    kept = False if False in answers else None if None in answers else True
    document = {
        "reference": pairs.reference[:count],
        "plan": pairs.candidate,
        "margin": pairs.margin,
        "p": p,
        "n": count,
        "kept": decision,
        "needed": None if decision is not None else pairs.needed(),
        "interrupted": interrupted,
        "data": metric["data"],
    }
    reason = "; ".join(filter(None, ("" if only_metric else verdict.reason, text)))
    checks = () if only_metric else verdict.checks
    return dataclasses.replace(verdict, kept=kept, reason=reason, checks=checks, metric=document)


def _derived_margin(untrained: float, trained: float) -> float:
    """Half a percent of what training brings: a share of the metric itself is none where that is near zero or
    negative, as -loss or R2 are.
    """
    brought = trained - untrained
    if not (math.isfinite(brought) and brought > SMALLEST_GAIN * abs(trained)):
        raise InputError(
            f"training brings the metric from {untrained:.4g} to {trained:.4g}, from which no margin "
            "follows: say with --margin what difference does not matter"
        )
    return DEFAULT_MARGIN * brought


def _step_of(values: Sequence[float]) -> float:
    """The largest number of which all differences between them are multiples; next to none where they move
    without steps.
    """
    finest, step = FINEST_STEP * max(map(abs, values), default=0.0), 0.0
    for low, high in itertools.pairwise(sorted(values)):
        rest = high - low
        while rest > finest:
            step, rest = rest, step % rest
    return step


def equivalence_p(differences: Sequence[float], margin: float, step: float = 0.0) -> float:
    """The p value of at least two `differences` having a mean within ±`margin`; small means equivalent.

    Of a metric that moves in a `step` wider than the margin, equal metrics may be chance: if the true mean
    were the margin, a share margin/step of the seeds would differ; the chance that none of `count` does.
    """
    count, center = len(differences), mean(differences)
    error = stdev(differences) / math.sqrt(count)
    if error == 0.0 and step > margin and not center:
        return (1.0 - margin / step) ** count
    if error == 0.0:
        return 0.0 if abs(center) < margin else 1.0
    return max(
        _upper_tail((margin + center) / error, count - 1), _upper_tail((margin - center) / error, count - 1)
    )


def _other_p(differences: Sequence[float], margin: float) -> float:
    """The p value of their mean lying outside ±`margin`; small means that it does."""
    error = stdev(differences) / math.sqrt(len(differences))
    beyond = abs(mean(differences)) - margin
    return _upper_tail(beyond / error, len(differences) - 1) if error else 1.0


def _upper_tail(t: float, freedom: int) -> float:
    """P(T > t) of Student's t, by Simpson's rule over the angle whose tangent is t / sqrt(freedom)."""
    if t < 0:
        return 1.0 - _upper_tail(-t, freedom)
    angles = numpy.linspace(math.atan(t / math.sqrt(freedom)), math.pi / 2, 2001)
    heights = numpy.cos(angles) ** (freedom - 1)
    weights = numpy.ones(2001)
    weights[1:-1:2], weights[2:-1:2] = 4.0, 2.0
    area = float((weights * heights).sum() * (angles[1] - angles[0]) / 3.0)
    constant = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    return min(1.0, constant * area)
