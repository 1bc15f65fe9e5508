"""The equivalence test: its distribution, its decisions, and a whole run on a small job."""

import random
from pathlib import Path

import pytest
import torch

import vivace
from vivace.errors import InputError, JobError
from vivace.testing import jobs
from vivace.training import crew
from vivace.training.crew import Company
from vivace.verifying import equivalence
from vivace.verifying.equivalence import Pairs, _upper_tail, equivalence_p, judge_by_metric
from vivace.verifying.verdict import Verdict
from vivace.verifying.verification import parse_budget

STAGE = f"{Path(__file__).parents[1] / 'scenes' / 'stage.py'}:job"
KEPT = Verdict(True, "rounding", 0.0, 0.0, 0, 0, "", num_checks=12)


@pytest.mark.parametrize(
    ("t", "freedom", "tail"),
    [
        (2.015, 5, 0.05),
        (2.571, 5, 0.025),
        (1.833, 9, 0.05),
        (3.25, 9, 0.005),
        (0.0, 4, 0.5),
        (6.314, 1, 0.05),
        (-2.015, 5, 0.95),
        (1.645, 2000, 0.05),
    ],
)
def test_the_tail_agrees_with_published_quantiles(t, freedom, tail):
    assert _upper_tail(t, freedom) == pytest.approx(tail, rel=2e-3)


def test_small_differences_are_equivalent_and_large_or_noisy_ones_are_not():
    assert equivalence_p([0.001, -0.001, 0.0005, 0.0], margin=0.005) < 0.01
    assert equivalence_p([0.011, 0.009, 0.0105, 0.01], margin=0.005) > 0.99
    assert equivalence_p([0.05, -0.05, 0.03, -0.04], margin=0.005) > 0.05


def pairs(reference, differences, margin=0.005, most=None):
    found = [a + d for a, d in zip(reference, differences, strict=True)]
    return Pairs(margin, most or len(reference), list(reference), found)


def test_noise_is_not_decided_and_the_seeds_that_would_are_told():
    noisy = pairs([0.67, 0.66, 0.68, 0.67, 0.65], [-0.02, 0.012, -0.01, 0.008, -0.014], margin=0.0034)
    assert noisy.decision() is None
    assert 100 < noisy.needed() < 300
    assert "about" in noisy.undecided("")
    assert "would decide" in noisy.undecided("")


def test_equal_metrics_that_move_in_steps_wider_than_the_margin_may_be_chance():
    twentieths = [0.85, 0.9, 0.95, 0.9, 0.85, 0.9, 0.9, 0.95]
    few = pairs(twentieths, [0.0] * 8, margin=0.01)  # a flip in every fifth seed would be a mean of 0.01
    assert few.decision() is None
    assert few.p == pytest.approx(0.8**8)
    assert few.needed() == 17  # of which 0.8**17 < 0.025
    told = (
        "about 17 seeds would decide; the metric moves in steps of 0.05, so more validation data or a wider"
    )
    assert f"{told} margin needs fewer" in few.undecided("")
    assert pairs(twentieths * 3, [0.0] * 24, margin=0.01).decision() is True
    assert pairs(twentieths, [0.0] * 8, margin=0.06).decision() is True
    same = Pairs(0.01, 8, twentieths, twentieths, same_bits=True)
    assert same.decision() is True
    smooth = [0.8512345, 0.9031, 0.9598761]
    assert pairs(smooth, [0.0] * 3, margin=0.01).decision() is True
    as_fp32 = [float(torch.tensor(value)) for value in twentieths]
    assert pairs(as_fp32, [0.0] * 8, margin=0.01).decision() is None


def test_a_clear_difference_is_broken_and_a_clear_sameness_kept():
    reference = [0.91, 0.90, 0.92, 0.91, 0.93]
    assert pairs(reference, [-0.05, -0.052, -0.049, -0.05, -0.051]).decision() is False
    assert pairs(reference, [0.0001, -0.0002, 0.0, 0.0001, -0.0001]).decision() is True


@pytest.mark.parametrize(
    ("reference", "differences", "words"),
    [
        ([1.0] * 5, [0.0] * 5, "is 1 whatever the seed"),
        ([0.5, 0.625, 0.75], [0.125] * 3, "all differences are equal"),
    ],
)
def test_equal_differences_prove_nothing(reference, differences, words):
    stuck = pairs(reference, differences)
    assert stuck.decision() is None
    assert words in stuck.undecided("")
    assert stuck.needed() is None


def test_the_same_trainings_are_equivalent_where_the_metric_can_move():
    assert pairs([0.9137, 0.9048, 0.9212], [0.0] * 3).decision() is True


def test_looking_after_each_seed_does_not_make_an_error_likelier():
    """At the margin itself, where equivalence is just untrue, at most one verdict of twenty says so."""
    numbers, wrong, most = random.Random(0), 0, 8
    for _ in range(600):
        found = Pairs(1.0, most)
        while found.decision() is None and len(found.candidate) < most:
            found.reference.append(numbers.gauss(50.0, 3.0))
            found.candidate.append(found.reference[-1] + numbers.gauss(1.0, 0.5))
        wrong += found.decision() is True
    assert wrong / 600 <= 0.05


class Metrics:
    """Stands in for the child processes that train: a metric for each seed."""

    def __init__(self, entry, source, *_, **__):
        self.source = source

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def ask(self, command, timeout, plan=None, seed=0):
        if command == "metric_facts":
            return {"name": "F1", "data": "validation"}
        if command == "untrained":
            return self.source["untrained"]
        found = self.source["plan" if plan else "reference"][seed]
        if found is None:
            raise KeyboardInterrupt
        return found


@pytest.fixture
def judge(monkeypatch):
    monkeypatch.setattr(equivalence, "Child", Metrics)
    monkeypatch.setattr(crew, "Child", Metrics)
    events = []

    def judge(reference, candidate, untrained=0.1, **options):
        source = {"reference": reference, "plan": candidate, "untrained": untrained}
        options = {"seeds": len(reference), "margin": None} | options
        plan = vivace.Plan.from_dict({"channels_last": {}})
        return judge_by_metric(
            Company(source), plan, KEPT, tell=lambda *event: events.append(event), **options
        )

    judge.events = events
    return judge


def test_the_margin_is_a_share_of_what_training_brings_whatever_the_metric(judge):
    negative = [-0.310, -0.300, -0.305]
    verdict = judge(negative, [m + 0.0001 * i for i, m in enumerate(negative)], untrained=-2.31)
    assert verdict.metric["margin"] == pytest.approx(0.01)
    assert verdict.kept
    with pytest.raises(InputError, match="say with --margin"):
        judge([0.1, 0.1], [0.1, 0.1], untrained=0.1)


def test_it_stops_as_soon_as_it_is_decided(judge):
    reference = [0.9, 0.91, 0.92, 0.9, 0.91, 0.93, 0.9, 0.92]
    verdict = judge(reference, [m + 1e-5 * (-1) ** i for i, m in enumerate(reference)])
    assert verdict.kept
    assert verdict.metric["n"] == 3
    assert [payload["n"] for kind, payload in judge.events if kind == "seed"] == [1, 2, 3]
    assert {payload["name"] for kind, payload in judge.events if kind == "seed"} == {"F1"}


def test_interrupted_or_out_of_time_it_says_what_the_seeds_show(judge):
    reference = [0.9, 0.95, 0.92, 0.9, 0.91]
    verdict = judge(reference, [0.91, 0.93, None, 0.9, 0.9])
    assert verdict.kept is None
    assert "interrupted after 2 of 5 seeds" in verdict.reason
    assert verdict.metric["interrupted"]
    assert verdict.metric["plan"] == [0.91, 0.93]
    short = judge(reference, reference[::-1], seconds=0.0)
    assert short.kept is None
    assert "in the time given, with 1 of 5 seeds" in short.reason


@pytest.mark.parametrize("where", ["reference", "plan"])
def test_interrupted_before_the_first_pair_it_keeps_what_lockstep_said(judge, where):
    first = {"reference": [0.9, 0.9], "plan": [0.9, 0.9]} | {where: [None, 0.9]}
    verdict = judge(first["reference"], first["plan"])
    assert verdict.kept is None
    assert "not decided, as it was interrupted after 0 of 2 seeds (F1 was not compared)" in verdict.reason
    assert verdict.num_checks == KEPT.num_checks
    assert (verdict.metric["interrupted"], verdict.metric["n"]) == (True, 0)


@pytest.mark.slow
def test_reference_and_plan_are_trained_and_compared():
    verdict = vivace.verify(STAGE, vivace.Plan(), metric=True, seeds=2, margin=0.05)
    assert verdict.kept
    assert verdict.metric is not None
    assert verdict.metric["n"] == 2
    assert verdict.metric["plan"] == verdict.metric["reference"]
    assert "p = " in verdict.reason
    assert verdict.metric["data"] == "training"
    assert "accuracy on the training data" in verdict.reason


def test_one_seed_is_no_test():
    with pytest.raises(InputError, match="needs at least 2 seeds, not 1"):
        vivace.verify(STAGE, vivace.Plan(), metric=True, seeds=1)


@pytest.mark.parametrize("margin", [0.0, -0.01, float("nan"), float("inf")])
def test_a_margin_within_which_nothing_can_lie_is_bad_input(margin):
    with pytest.raises(InputError, match="must be a difference of the metric above 0"):
        vivace.verify(STAGE, vivace.Plan(), metric=True, margin=margin)


@pytest.mark.parametrize("given", [{"seeds": 3}, {"margin": 0.1}], ids=str)
def test_what_only_the_metric_needs_is_not_ignored_without_it(given):
    with pytest.raises(InputError, match="would count for the test of the metric only"):
        vivace.verify(STAGE, vivace.Plan(), **given)


def test_a_budget_is_seconds_or_a_time():
    assert [parse_budget(text) for text in (30, "30", "90s", "2m", "1.5h")] == [30, 30, 90, 120, 5400]
    for wrong in ("soon", "2", -1, "2 days"):
        with pytest.raises(InputError, match="must be seconds from 5 on"):
            parse_budget(wrong)


def test_a_job_without_a_metric_is_told_before_anything_runs():
    heard = []
    with pytest.raises(JobError, match="the Job has no metric"):
        vivace.verify(
            jobs.mlp(), vivace.Plan.from_dict({"channels_last": {}}), metric=True, on_event=heard.append
        )
    assert not heard
