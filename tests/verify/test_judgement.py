"""Figures that are not finite: never kept, and said so in words that fit."""

import math

import pytest

from vivace.verify.judgement import check, summary


def test_a_job_that_diverges_under_rounding_cannot_be_judged():
    fine = check("loss", 0, 0.0, 1e-6, 2.0**-8)
    document = summary([fine, check("scale", 21, math.inf, math.inf, 2.0**-8)])
    assert not document["kept"]
    assert (
        document["reason"] == "scale, from step 21, cannot be judged: rounding alone makes this job diverge"
    )


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_figure_that_is_not_finite_is_the_worst(value):
    document = summary([check("loss", 0, 1e-5, 1e-6, 0.0), check("scale", 10, value, 1e-6, 0.0)])
    assert not document["kept"]
    assert document["displacement_envelopes"] == math.inf
    assert document["reason"].startswith("scale, from step 10, is inf envelopes off")


def test_a_layer_that_does_not_move_has_no_scale_to_judge():
    assert check("scale of 0.frozen.weight", 0, 0.5, math.inf, 0.0)["kept"]
