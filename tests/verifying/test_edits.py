"""The judge for edits: harmless ones are the same model, mistakes are named by quantity, layer, step."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.optim import SGD

import vivace
from vivace.errors import InputError
from vivace.testing import jobs
from vivace.verifying import beginnings

TRAINING = f"{Path(__file__).parents[1] / 'scenes' / 'edits' / 'training.py'}"


def judged(edited, original="job", **options):
    return vivace.verify(f"{TRAINING}:{edited}", against=f"{TRAINING}:{original}", **options)


@pytest.mark.parametrize(
    ("edited", "promise", "note"),
    [
        ("tidied", "exact", ""),
        ("reordered", "rounding", "initial weights are other draws"),
        ("compiled", "exact", ""),
        ("grouped_anew", "exact", ""),
    ],
)
def test_a_harmless_edit_is_the_same_model(edited, promise, note):
    verdict = judged(edited)
    assert verdict.kept, verdict.reason
    assert verdict.promise == promise
    assert note in verdict.reason
    assert verdict.first is None
    assert verdict.bias == ({"pairs": 32, "not_tested": ""} if promise == "rounding" else {})


@pytest.mark.parametrize(
    ("edited", "quantity", "layer"),
    [
        ("reduction_changed", "loss", None),
        ("dropout_swapped", "p", "dropout (Dropout)"),
        ("biases_decayed", "weight_decay", "first.bias"),
        ("labels_shifted", "data", None),
        ("begun_wider", "initial value", "first.weight"),
        ("shortened", "epochs", None),
    ],
)
def test_a_mistake_is_named_by_where_it_shows_first(edited, quantity, layer):
    verdict = judged(edited)
    assert verdict.kept is False
    assert verdict.first == {"quantity": quantity, "layer": layer, "step": 0}, verdict.reason


def test_what_comes_late_is_found_where_all_was_equal_before():
    verdict = judged("scaled_later")
    assert verdict.kept is False
    assert verdict.first["quantity"] == "loss"
    assert verdict.first["step"] > 24
    assert "all before are equal bit for bit" in verdict.reason
    verdict = judged("rounded_later")
    assert verdict.kept, verdict.reason
    assert verdict.promise == "rounding"
    assert "differ by rounding" in verdict.reason


@pytest.mark.parametrize(
    ("edited", "original", "words"),
    [
        ("measured_in_half", "measured", "over evaluations and epochs"),
        ("last_batch_lighter", "long", "over evaluations and epochs"),
        ("warming_anew", "warming", "gone on from a checkpoint it trains on otherwise"),
    ],
)
def test_a_mistake_in_the_life_of_a_training_is_found(edited, original, words):
    verdict = judged(edited, original)
    assert verdict.kept is False
    told = [verdict.reason, *(check["name"] for check in verdict.checks if check["kept"] is False)]
    assert any(words in text for text in told), told


@pytest.mark.parametrize(
    ("edited", "original", "promise"),
    [
        ("measured_tidily", "measured", "exact"),
        ("long_and_reordered", "long", "rounding"),
        ("warming_anew", "warming_anew", "exact"),
    ],
)
def test_a_harmless_edit_lives_the_same_life(edited, original, promise):
    verdict = judged(edited, original)
    assert verdict.kept, verdict.reason
    assert verdict.promise == promise


@pytest.mark.parametrize(
    ("edited", "original", "quantity", "layer", "words"),
    [
        ("falling_sooner", "falling", "schedule", None, "after 201 steps of its schedule lr is"),
        ("copied", "stacked", "initial value", "blocks.1.weight", "the very numbers of blocks.0.weight"),
        ("unpadded", "stacked", "initial value", "first.weight", "row 0 of first.weight begins drawn"),
        ("one_mask", "stacked", "random numbers drawn", None, "at 1 instead of 2 places"),
        (
            "mask_of_units",
            "stacked",
            "random numbers drawn",
            None,
            "draws 16 random numbers, and 256 are due",
        ),
        (
            "mask_lost_in_steps",
            "stacked_in_steps",
            "random numbers drawn",
            None,
            "at 1 instead of 2 places",
        ),
        (
            "mask_of_units_in_steps",
            "stacked_in_steps",
            "random numbers drawn",
            None,
            "samples share their masks",
        ),
        ("measured_but_the_last", "measured", "metric of the same weights", None, "on the same 6 batches"),
        ("noise_cached", "noisy", "data", None, "of epoch 2 of the data"),
        ("seeded_itself", "job", "initial value", "first.weight", "the same numbers under every seed"),
        ("norm_detached", "job", "gradient scale", "norm.weight", "norm.weight gets no gradient"),
        ("rewritten_without_decay", "job", "weight_decay", "first.weight", ""),
        ("adamw_with_decay", "adamw_without_decay", "weight_decay", "first.weight", ""),
    ],
)
def test_what_few_steps_do_not_show_is_compared_by_itself(edited, original, quantity, layer, words):
    verdict = judged(edited, original)
    assert verdict.kept is False
    broken = {check["quantity"] for check in verdict.checks if check["kept"] is False}
    assert verdict.first["quantity"] == quantity or quantity in broken, verdict.reason
    assert verdict.first["layer"] == layer or quantity in broken
    assert words in verdict.reason


@pytest.mark.parametrize(
    ("edited", "original"),
    [
        ("falling_by_hand", "falling"),
        ("drawn_anew", "stacked"),
        ("masks_at_once", "stacked"),
        ("measured_and_reordered", "measured"),
        ("rewritten", "job"),
        ("adamw_without_decay", "adam"),
    ],
)
def test_what_is_the_same_in_another_way_is_kept(edited, original):
    verdict = judged(edited, original)
    assert verdict.kept, verdict.reason


def test_that_a_metric_could_not_be_compared_is_told():
    verdict = judged("measured_in_turn", "measured_in_turn")
    assert verdict.kept, verdict.reason
    assert "the metric was not compared: the original's says otherwise each time" in verdict.reason


def test_what_chance_decides_is_not_counted_and_that_is_told():
    verdict = judged("by_other_chance", "by_chance")
    assert verdict.kept, verdict.reason
    assert "numbers of a step were not counted: chance decides how many" in verdict.reason


def test_lost_clipping_shows_in_the_update():
    verdict = judged("clipping_lost")
    assert verdict.kept is False
    assert verdict.first["step"] == 0


def test_missing_zero_grad_is_found_in_an_own_step():
    verdict = judged("gradients_kept", "stepping")
    assert verdict.kept is False
    assert judged("stepping", "stepping").promise == "exact"


def test_lower_precision_is_another_model_unless_it_is_allowed():
    assert judged("in_half").kept is False
    verdict = judged("in_half", precision="bfloat16")
    assert verdict.kept, verdict.reason


def test_gradients_that_lean_to_one_side_are_found_where_the_edit_may_round():
    verdict = judged("leaning", precision="bfloat16")
    assert verdict.kept is False
    assert verdict.bias == {"pairs": 32, "not_tested": ""}
    broken = {check["quantity"] for check in verdict.checks if check["kept"] is False}
    assert {"loss bias", "gradient bias"} <= broken


def test_other_parameters_are_refused_by_name():
    with pytest.raises(InputError, match=r"other parameters or buffers \(head\.weight is gone"):
        judged("renamed")


def test_an_optimizer_that_keeps_other_things_cannot_go_on_from_the_original():
    verdict = judged("own_momentum", "averaged")
    assert verdict.kept is None
    assert "the optimizer keeps average of first.weight, and mean in the original" in verdict.reason
    assert judged("own_momentum").kept is False


def test_the_command_prints_where_it_shows_first():
    command = [sys.executable, "-m", "vivace", "verify", f"{TRAINING}:dropout_swapped"]
    command += ["--against", TRAINING, "--json", "--quiet"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 1, found.stderr
    document = json.loads(found.stdout)
    assert document["kept"] is False
    assert document["first"]["layer"] == "dropout (Dropout)"
    assert "0.2 in the original" in document["reason"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "needs either a plan"),
        ({"plan": vivace.Plan(), "against": TRAINING}, "needs either a plan"),
        ({"against": TRAINING, "precision": "int8"}, "not 'int8'"),
        ({"plan": vivace.Plan(), "precision": "bfloat16"}, "a plan declares its own"),
    ],
)
def test_arguments_that_do_not_fit_together_are_refused(options, words):
    with pytest.raises(InputError, match=words):
        vivace.verify(f"{TRAINING}:job", **options)


@pytest.mark.parametrize("gone", ["metric", "validation"])
def test_an_edit_that_leaves_out_an_evaluation_is_told(gone):
    plain = jobs.mlp()
    whole = dataclasses.replace(plain, metric=lambda model, batches: 0.5, validation=plain.data)
    verdict = vivace.verify(dataclasses.replace(whole, **{gone: None}), against=whole, budget=20)
    assert verdict.kept is False
    assert verdict.reason.startswith(f"it has no {gone}, and the original has")


@pytest.mark.parametrize("original_fails", [False, True])
def test_a_metric_that_fails_where_the_original_s_does_not_is_told(original_fails):
    failing, half = (lambda model, batches: 1 / 0), (lambda model, batches: 0.5)
    whole = dataclasses.replace(jobs.mlp(), metric=failing, validation=jobs.mlp().data)
    original = whole if original_fails else dataclasses.replace(whole, metric=half)
    verdict = vivace.verify(whole, against=original, budget=20)
    assert verdict.kept is original_fails, verdict.reason
    if not original_fails:
        assert verdict.reason == "its metric fails on batches on which it does not in the original"
        assert verdict.first == {"quantity": "metric of the same weights", "layer": None, "step": 0}


def test_trainings_that_move_no_weight_are_not_judged():
    still = dataclasses.replace(jobs.mlp(), optimizer=lambda model: SGD(model.parameters(), lr=0.0))
    verdict = vivace.verify(still, against=still, budget=20)
    assert verdict.kept is None
    assert verdict.reason.startswith("the job's own steps left every weight where it was")


@pytest.mark.parametrize("draw", [torch.randn, torch.rand, lambda *shape: torch.rand(*shape) - 0.5])
@pytest.mark.parametrize("clustered", [False, True])
def test_initial_weights_a_tenth_larger_are_other_ones(draw, clustered):
    """Also where the size is drawn itself, a build at a time, which makes it less certain."""
    torch.manual_seed(0)

    def drawn(scale):
        sizes = 1 + 0.01 * torch.randn(8, 1) if clustered else 1.0
        return {"weight": beginnings.Drawn((draw(8, 1024) * scale * sizes).flatten(), torch.zeros(8, 0), "")}

    for _ in range(200):
        (found,) = beginnings.checks_of(drawn(1.0), drawn(1.0))
        assert found["kept"]
    (found,) = beginnings.checks_of(drawn(1.1), drawn(1.0))
    assert found["kept"] is False
