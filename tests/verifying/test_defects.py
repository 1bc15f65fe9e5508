"""Planted defects, a few of each kind, are caught by the part of the ruler that is there for them."""

import pytest

from vivace.errors import Refused
from vivace.verifying.effort import Effort

# What is caught, on which job, and words of the reason: the part of the ruler that saw it.
CAUGHT = [
    ("residual", "weight_decay_lost", "weight_decay of"),
    ("cnn", "scheduler_stepped_twice", "steps of a schedule"),
    ("cnn", "schedule_baked_in", "dictated"),
    ("cnn", "batch_norm_momentum_value_0.01", "momentum of"),
    ("cnn", "statistics_not_updated", "buffer"),
    ("cnn", "statistics_of_half_a_batch", "buffer"),
    ("cnn", "batch_norm_in_evaluation_mode", "training of"),
    ("cnn", "labels_shifted_share_0.02", "data"),
    ("cnn", "sample_repeated", "data"),
    ("cnn", "batch_order_changed", "other batches"),
    ("cnn", "last_batch_dropped", "other batches"),
    ("cnn", "every_epoch_alike", "other batches"),
    ("cnn", "layer_frozen_after_60", ""),
    ("cnn", "momentum_reset_after_40", ""),
    ("cnn", "stale_weights_since_40_every_1000000000", ""),
    ("cnn", "weights_rounded_on_close", "closing"),
    ("cnn", "activation_approximated", "evaluation under the plan"),
    ("cnn", "weight_gradient_aside_share_0.1", "gradient drift"),
    ("cnn", "weight_gradient_turned_degrees_8", "gradient drift"),
    ("transformer", "gradients_left_scaled", "dictated"),
    ("transformer", "unscale_missing_before_clipping", "dictated"),
    ("transformer", "gradient_of_a_layer_scaled", "gradient"),
    ("transformer", "epsilon_lost_value_1e-15", "dictated"),
    ("transformer", "decay_on_everything", "weight_decay of"),
    ("transformer", "weights_untied", "is new"),
    ("transformer", "tied_gradient_halved", "gradient"),
    ("transformer", "one_dropout_off", "p of"),
    ("transformer", "other_dropout_seed", "the same random numbers in each step"),
    ("transformer", "last_micro_batch_lost", "data"),
    ("transformer", "padding_mask_ignored", ""),
    ("lstm", "accumulation_not_divided", "dictated"),
    ("lstm", "sum_for_mean", "dictated"),
    ("lstm", "pieces_weighted_alike", "dictated"),
    ("lstm", "momentum_reset_every_5", "dictated"),
    ("lstm", "betas_position_1_value_0.99", ""),
    ("lstm", "update_swallowed", "dictated"),
    ("lstm", "one_gradient_zeroed", "dictated"),
    ("lstm", "parameter_not_in_optimizer", "is gone"),
    ("autoencoder", "dropout_on_in_evaluation", "evaluation under the plan"),
]


@pytest.fixture(scope="module")
def rulers(examined, ruler_of):
    return lambda name, seed=0: ruler_of(examined.JOBS[name], seed)


@pytest.mark.parametrize(("job", "defect", "words"), CAUGHT, ids=[f"{j}-{d}" for j, d, _ in CAUGHT])
def test_a_planted_defect_is_caught_by_what_is_there_for_it(job, defect, words, rulers):
    verdict = rulers(job).judge({f"defect_{defect}": {}})
    assert verdict["kept"] is False
    broken = [verdict["reason"], *(check["name"] for check in verdict["checks"] if check["kept"] is False)]
    assert any(words in text for text in broken), broken


# An LSTM under autocast does not start on every processor.
@pytest.mark.parametrize(
    ("job", "half"), [("cnn", "bf16_autocast"), ("transformer", "bf16_autocast"), ("lstm", "bf16_weights")]
)
def test_real_rounding_does_not_hide_a_defect(job, half, rulers):
    assert rulers(job).judge({half: {}, "defect_learning_rate_factor_0.98": {}})["kept"] is False


def test_a_defect_that_cannot_act_refuses(rulers):
    with pytest.raises(Refused, match="BatchNorm"):
        rulers("lstm").judge({"defect_statistics_not_updated": {}})


@pytest.mark.parametrize(
    ("job", "plan"),
    [
        ("cnn", {"bf16_autocast": {}, "channels_last": {}, "fused_optimizer": {}}),
        ("transformer", {"bf16_weights": {}, "fused_optimizer": {"kind": "foreach"}}),
        ("autoencoder", {"micro_batches": {"num": 2}}),
        ("lstm", {"micro_batches": {"num": 4}, "fused_optimizer": {}}),
    ],
)
def test_correct_plans_are_kept(job, plan, rulers):
    verdict = rulers(job).judge(plan)
    assert verdict["kept"], verdict["reason"]


def test_a_unit_that_rounding_switches_off_is_no_defect(rulers):
    """At one point fp16 throws a ReLU of this job to the other side of zero, and no shadow does."""
    verdict = rulers("mlp", seed=2).judge({"fp16_autocast": {}})
    assert verdict["kept"], verdict["reason"]
    defect = {"fp16_autocast": {}, "defect_gradient_of_a_layer_scaled": {}}
    assert rulers("mlp", seed=2).judge(defect)["kept"] is False


def test_the_demanded_defects_are_there(examined):
    planted = [*examined.defects.PLANTED, *examined.defects.FURTHER]
    assert len(set(planted)) == len(planted)
    assert len(planted) > 60


def test_a_rehearsal_gets_its_share_of_the_seconds():
    full = Effort()
    assert full.rehearsing(None, 1.0).rehearsal == full.rehearsal
    assert full.rehearsing(10.0, 0.02).rehearsal == 50
    assert full.rehearsing(10.0, 1.0).rehearsal == 32


def test_a_loss_scale_that_still_has_to_fall_is_no_defect(rulers):
    """The first batch at the first weights overflows in half precision where later ones do not any more."""
    verdict = rulers("long").judge({"fp16_autocast": {}})
    assert verdict["kept"], verdict["reason"]
