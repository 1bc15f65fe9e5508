"""Healthy plans on jobs with masked attention, dropout on maps and noise are kept; defects are not."""

import dataclasses
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import vivace
from vivace import Stage
from vivace.plan import Plan
from vivace.testing import jobs
from vivace.verifying.ruler import Ruler

MACHINE = vivace.inspect().to_dict()
HALF = {"bf16_autocast": {}}
HIDING_FILE = Path(__file__).parents[1] / "scenes" / "edits" / "hiding.py"
HIDING = runpy.run_path(str(HIDING_FILE))


@pytest.fixture(scope="module")
def rulers(examined, ruler_of):
    return lambda name: ruler_of(examined.JOBS[name], 0)


def worst(verdict):
    return max(check["score"] for check in verdict["checks"])


@pytest.mark.parametrize("job", ["digits", "vae"])
def test_another_memory_order_draws_the_same_masks_and_noise(job, rulers):
    verdict = rulers(job).judge({"channels_last": {}})
    assert verdict["kept"], verdict["reason"]
    assert "random streams differ" not in verdict["reason"]
    assert worst(verdict) < 2


@pytest.mark.parametrize(
    ("job", "plan"),
    [
        ("digits", {"bf16_autocast": {}, "channels_last": {}}),
        ("vae", {"bf16_autocast": {}}),
        ("bert", {"bf16_autocast": {}}),
        ("bert", {"fused_optimizer": {}}),
    ],
)
def test_correct_plans_are_kept(job, plan, rulers):
    verdict = rulers(job).judge(plan)
    assert verdict["kept"], verdict["reason"]
    assert worst(verdict) > 0


@pytest.mark.parametrize("job", ["digits", "vae", "bert"])
def test_an_update_in_the_backward_pass_is_kept(job, rulers):
    verdict = rulers(job).judge({"optimizer_in_backward": {}})
    assert verdict["kept"], verdict["reason"]
    assert verdict["promise"] == "exact"


def test_gradients_are_compared_where_each_is_gone_after_its_update(rulers):
    verdict = rulers("digits").judge({"bf16_autocast": {}, "optimizer_in_backward": {}})
    assert verdict["kept"], verdict["reason"]
    names = [check["name"] for check in verdict["checks"]]
    assert "gradient scale, from step 0" in names


@pytest.mark.parametrize(
    ("job", "plan"),
    [
        ("digits", {"channels_last": {}, "defect_dropout_unscaled": {}}),
        ("digits", {"channels_last": {}, "defect_dropout_halved": {}}),
        ("digits", {"bf16_autocast": {}, "defect_learning_rate_factor_0.98": {}}),
        ("vae", {"channels_last": {}, "defect_learning_rate_factor_0.98": {}}),
        ("bert", {"bf16_autocast": {}, "defect_dropout_unscaled": {}}),
        ("digits", {"bf16_autocast": {}, "optimizer_in_backward": {}, "defect_dropout_unscaled": {}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_defects_are_caught(job, plan, rulers):
    assert rulers(job).judge(plan)["kept"] is False


def test_what_a_short_judgement_finds_broken_near_its_limit_is_judged_again_or_not_yet(examined, monkeypatch):
    ruler = Ruler(examined.JOBS["digits"](0), MACHINE)
    ruler.prepare(seconds=1e-3)
    short, judgement = ruler.effort, ruler._judgement

    def strict(plan):
        document = judgement(plan)
        if ruler.effort.seeds > short.seeds:
            return document
        figure = {**document["checks"][0], "score": 14.9, "limit": 8.0, "kept": False}
        return {**document, "kept": False, "reason": "loss is off", "checks": [figure]}

    monkeypatch.setattr(ruler, "_judgement", strict)
    unknown = ruler.judge({"channels_last": {}}, seconds=1e-3)
    assert unknown["kept"] is None
    assert "too near to say" in unknown["reason"]
    assert ruler.effort == short
    assert ruler.judge({"channels_last": {}})["kept"] is True
    assert ruler.effort.seeds > short.seeds


@pytest.mark.parametrize(("plan", "otherwise"), [(HALF, True), ({"fused_optimizer": {}}, False)])
def test_masks_that_a_kernel_draws_are_of_its_own_in_16_bits(plan, otherwise, ruler_of):
    """The stream tells nothing: it moves as far."""
    verdict = ruler_of(HIDING["job"]).judge(plan)
    assert verdict["kept"], verdict["reason"]
    assert ("random streams differ" in verdict["reason"]) == otherwise


def test_so_is_the_same_training_under_autocast():
    verdict = vivace.verify(f"{HIDING_FILE}:in_half", against=f"{HIDING_FILE}:job", precision="bfloat16")
    assert verdict.kept, verdict.reason
    assert "random streams differ" in verdict.reason


@pytest.mark.parametrize(
    ("device", "plan", "otherwise"), [("cuda", HALF, True), ("cuda", {}, False), ("cpu", HALF, False)]
)
def test_a_gpus_compiled_code_may_leave_out_others_in_16_bits(device, plan, otherwise, ruler_of):
    facts = SimpleNamespace(ranks=None)
    build = SimpleNamespace(device=torch.device(device), facts=facts)
    session = SimpleNamespace(build=build, plan=Plan.from_dict({**plan, "compile": {}}))
    assert ruler_of(HIDING["job"])._masks_otherwise(session) == otherwise


def stepping():
    """With a step of its own, and two places that leave something out."""

    def step(model, optimizer, batch):
        loss = plain.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def model():
        first = nn.Linear(8, 32), nn.Dropout(0.5), nn.ReLU()
        return nn.Sequential(*first, nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 4))

    plain = jobs.mlp()
    return dataclasses.replace(plain, model=model, loss=None, step=step)


def test_a_mask_that_a_plan_loses_is_found_in_an_own_step(ruler_of, planted):
    def lose(build):
        build.models[0][1].p = 0.0

    verdict = ruler_of(stepping).judge(planted(lose, Stage.MODEL))
    assert verdict["kept"] is False
    assert "at 1 instead of 2 places" in verdict["reason"]
    assert ruler_of(stepping).judge(HALF)["kept"]
