"""Figures that are not finite: never kept, and said so in words that fit."""

import math

import pytest
import torch

from vivace.verifying.displacement import Outcome, State, distances
from vivace.verifying.judgement import check, curve_check, is_near, outright, summary


@pytest.mark.parametrize("value", [0.0, 1e-6, math.inf, math.nan])
def test_a_job_that_diverges_under_rounding_cannot_be_judged(value):
    fine = check("loss", 0, 0.0, 1e-6, 2.0**-8)
    document = summary([fine, check("scale", 21, value, math.nan, 2.0**-8)])
    assert document["kept"] is None
    assert document["displacement_envelopes"] != document["displacement_envelopes"]
    assert (
        document["reason"] == "scale, from step 21, cannot be judged: rounding alone makes this job diverge"
    )


def test_a_curve_whose_shadows_are_not_finite_cannot_be_judged():
    found = curve_check([1.0, 0.9], [1.0, 0.9], [1e-3, math.nan])
    assert found["kept"] is None
    assert curve_check([1.0, math.nan], [1.0, 0.9], [1e-3, 1e-3])["kept"] is False


def test_what_is_broken_beside_what_cannot_be_judged_is_broken():
    document = summary([check("scale", 0, 1.0, 1e-6, 0.0), check("residual", 0, 0.1, math.nan, 0.0)])
    assert document["kept"] is False
    assert document["reason"].startswith("scale, from step 0, is 1e+06 envelopes off")


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_figure_that_is_not_finite_is_the_worst(value):
    document = summary([check("loss", 0, 1e-5, 1e-6, 0.0), check("scale", 10, value, 1e-6, 0.0)])
    assert not document["kept"]
    assert document["displacement_envelopes"] == math.inf
    assert document["reason"].startswith("scale, from step 10, is inf envelopes off")


def test_a_layer_that_does_not_move_has_no_scale_to_judge():
    assert check("scale of 0.frozen.weight", 0, 0.5, math.inf, 0.0)["kept"]


@pytest.mark.parametrize(("shift", "kept"), [(1e-7, True), (1e-2, False)], ids=["rounding", "a defect"])
def test_a_running_mean_that_hardly_moves_is_held_against_the_spread_of_a_batch(shift, kept):
    names = {"norm.running_mean": torch.zeros(4), "norm.running_var": torch.ones(4)}
    before, weights = State({"w": torch.zeros(2)}, names), {"w": torch.ones(2)}

    def moved_to(mean):
        after = State(weights, {**names, "norm.running_mean": torch.full((4,), mean)})
        return Outcome([1.0], after, torch.ones(3), torch.zeros(1), drew=False)

    found = distances(moved_to(1e-8 + shift), moved_to(1e-8), before, {}, steps=1)
    name = "buffer norm.running_mean"
    assert check(name, 0, found[name], 0.0, 2.0**-16)["kept"] == kept


@pytest.mark.parametrize(
    ("kind", "value", "near"),
    [
        ("loss", 14.9, True),
        ("loss", 100.0, False),
        ("scale of 0.w", 70.0, True),
        ("dictated loss", 9.0, False),
    ],
)
def test_what_more_shadows_may_keep_is_near(kind, value, near):
    assert is_near(summary([check("loss", 0, 0.0, 1.0, 0.0), check(kind, 0, value, 1.0, 0.0)])) == near


def test_a_plain_fault_is_never_near():
    assert not is_near(outright(False, "closing the session changes the weights", "facts"))
