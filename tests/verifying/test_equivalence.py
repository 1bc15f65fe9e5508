"""The equivalence test: its distribution, its decision, and a whole run on a small job."""

from pathlib import Path

import pytest

import vivace
from vivace.errors import InputError
from vivace.verifying.equivalence import _upper_tail, equivalence_p

STAGE = f"{Path(__file__).parents[1] / 'scenes' / 'stage.py'}:job"


@pytest.mark.parametrize(
    ("t", "freedom", "tail"),
    [
        (2.015, 5, 0.05),
        (2.571, 5, 0.025),
        (1.833, 9, 0.05),
        (3.25, 9, 0.005),
        (0.0, 4, 0.5),
        (6.314, 1, 0.05),
    ],
)
def test_the_tail_agrees_with_published_quantiles(t, freedom, tail):
    assert _upper_tail(t, freedom) == pytest.approx(tail, rel=2e-3)


def test_small_differences_are_equivalent_and_large_or_noisy_ones_are_not():
    assert equivalence_p([0.001, -0.001, 0.0005, 0.0], margin=0.005) < 0.01
    assert equivalence_p([0.011, 0.009, 0.0105, 0.01], margin=0.005) > 0.99
    assert equivalence_p([0.05, -0.05, 0.03, -0.04], margin=0.005) > 0.05
    assert equivalence_p([0.0, 0.0, 0.0], margin=0.005) == 0.0


@pytest.mark.slow
def test_reference_and_plan_are_trained_and_compared():
    verdict = vivace.verify(STAGE, vivace.Plan(), metric=True, seeds=2, margin=0.05)
    assert verdict.kept
    assert verdict.metric is not None
    assert verdict.metric["n"] == 2
    assert verdict.metric["plan"] == verdict.metric["reference"]
    assert "p = " in verdict.reason
    assert verdict.metric["data"] == "training"
    assert "metric on the training data" in verdict.reason


def test_one_seed_is_no_test():
    with pytest.raises(InputError, match="needs at least 2 seeds, not 1"):
        vivace.verify(STAGE, vivace.Plan(), metric=True, seeds=1)


@pytest.mark.parametrize("given", [{"seeds": 3}, {"margin": 0.1}], ids=str)
def test_what_only_the_metric_needs_is_not_ignored_without_it(given):
    with pytest.raises(InputError, match="would count for the test of the metric only"):
        vivace.verify(STAGE, vivace.Plan(), **given)
