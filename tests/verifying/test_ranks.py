"""Do several ranks train the model that one process trains on the joined batch?"""

import json
from pathlib import Path

import pytest

SCENE = Path(__file__).parent / "scenes" / "rank.py"


@pytest.fixture
def judged(start_scene, places, tmp_path):
    """``(job, plan) -> [answer]``: what a Ruler in each of two ranks says."""

    def start(job, plan):
        answers = [tmp_path / f"{rank}.json" for rank in range(2)]
        children = []
        for answer, place in zip(answers, places(), strict=True):
            scene = {"environment": place, "job": job, "plan": plan, "meeting": "x", "answer": str(answer)}
            children.append(start_scene(SCENE, SCENE=scene))
        for child in children:
            child.join(100)
            if child.exitcode is None:
                child.kill()
        return [json.loads(answer.read_text()) for answer in answers]

    return start


@pytest.mark.parametrize("job", ["plain", "dropping"])
def test_a_mean_over_the_samples_is_the_same_model(judged, job):
    first, second = judged(job, {"ddp": {}})
    assert first == second
    assert first["kept"], first["reason"]
    assert first["promise"] == "rounding"
    assert first["num_checks"] > 20


def test_a_mean_over_what_counts_in_each_share_is_another_model(judged):
    first, second = judged("weighted", {"ddp": {}})
    assert first == second
    assert first["kept"] is False, first
    assert first["loss_envelopes"] > 8


@pytest.mark.parametrize("beside", [{}, {"micro_batches": {}, "bf16_autocast": {}}])
def test_divided_weights_are_compared_whole(judged, beside):
    first, second = judged("blocked", {"fsdp": {}, **beside})
    assert first == second
    assert first["kept"], first["reason"]
    assert first["num_checks"] > 20


@pytest.mark.slow
def test_compiled_blocks_of_divided_weights_are_the_same_model(judged):
    first, second = judged("blocked", {"fsdp": {}, "compile": {"regional": True}})
    assert first == second
    assert first["kept"], first["reason"]
    assert first["num_checks"] > 20
    assert first["compiled_graphs"] > 0


def test_divided_weights_do_not_hide_another_model(judged):
    first, _ = judged("blocked_weighted", {"fsdp": {}})
    assert first["kept"] is False, first
    assert first["loss_envelopes"] > 8


def test_compressed_gradients_are_rounding_and_statistics_of_a_share_are_not(judged):
    first, _ = judged("plain", {"ddp": {}, "gradient_compression": {}})
    assert first["kept"], first["reason"]
    assert first["promise"] == "rounding"
    assert judged("normed", {"ddp": {}})[0]["promise"] == "semantics"


def test_a_batch_that_cannot_be_shared_is_an_error_on_every_rank(judged):
    for answer in judged("uneven", {"ddp": {}}):
        assert "a batch of 9 samples cannot be shared by 2 ranks" in answer["error"]


@pytest.mark.slow
def test_a_launch_of_torchrun_gives_one_answer(forked_torchrun, tmp_path):
    plan = tmp_path / "ddp.toml"
    plan.write_text("format = 1\n[techniques.ddp]\n")
    words = ["verify", f"{SCENE}:plain", "--plan", str(plan), "--budget", "10", "--json"]
    code, output, errors = forked_torchrun(words)
    assert code == 0, errors
    (document,) = [json.loads(line) for line in output.splitlines()]
    assert (document["kept"], document["ranks"]) == (True, 2)
    assert errors.count("Same model: yes") == 1
    assert "2 ranks, each with its share of every batch" in errors.replace("\n", " ")


def test_a_plan_that_trains_as_many_models_is_refused_once(command_on_ranks, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text("format = 1\n[techniques.fused_optimizer]\n")
    codes, errors = command_on_ranks("verify", f"{SCENE}:plain", "--plan", str(plan))
    assert codes[0] == 2
    sentence = "would train 2 separate models: add [techniques.ddp] or [techniques.fsdp] to the plan"
    assert errors.count(sentence) == 1
