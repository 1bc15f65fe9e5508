"""Ranks that divide the weights: trained, evaluated, killed, resumed on any number, and ended by a fault."""

import json
from pathlib import Path

import pytest
import torch

import vivace
from vivace.training.ranks import for_so_many

DIVIDED = Path(__file__).parent / "scenes" / "divided.py"
FSDP = "format = 1\n[techniques.fsdp]\n"
DDP = "format = 1\n[techniques.ddp]\n"


@pytest.fixture
def train(launch, launch_ranks):
    """``(out, plan, ranks, job, **scene) -> [answer]`` of each rank, all of which end alike."""

    def start(out, plan, ranks=2, job="job", wanted=0, scene=(), **arguments):
        found = {"out": str(out), **arguments}
        shared = {"file": DIVIDED, **dict(scene), **({"plan": plan} if plan else {})}
        children = launch_ranks(job, found, ranks, **shared) if ranks > 1 else [launch(job, found, **shared)]
        codes = [child.wait() for child in children]
        answers = [child.answer if child.answer_path.exists() else None for child in children]
        assert codes == [wanted] * ranks, answers
        return answers

    return start


def test_it_trains_what_ddp_trains_to_the_last_bit(train, tmp_path, digest):
    for name, plan in (("ddp", DDP), ("fsdp", FSDP)):
        (tmp_path / name).mkdir()
        found = train(tmp_path / name / "run", plan, job="unclipped")
        assert found[0]["metric"] == found[1]["metric"]
        assert found[0]["notices"] == []
    one, other = tmp_path / "ddp" / "run", tmp_path / "fsdp" / "run"
    assert digest(one / "model.pt") == digest(other / "model.pt")
    assert digest(other / "model.pt") == digest(tmp_path / "fsdp" / "handed_on.pt")
    documents = [json.loads((run / "run.json").read_text()) for run in (one, other)]
    assert documents[0]["metric"] == documents[1]["metric"]
    assert documents[0]["loss"] == documents[1]["loss"]
    states = [torch.load(run / "checkpoints" / "step_9" / "state.pt") for run in (one, other)]
    assert states[1]["optimizer"]["param_groups"] == states[0]["optimizer"]["param_groups"]
    for number, wanted in states[0]["optimizer"]["state"].items():
        for name, value in wanted.items():
            assert torch.equal(states[1]["optimizer"]["state"][number][name], value)


@pytest.mark.fault(1)
def test_killed_ranks_resume_bit_for_bit(train, tmp_path, digest):
    train(tmp_path / "whole", FSDP)
    scene = {"kill_in_step": 6}
    train(tmp_path / "parts", FSDP, wanted=-9, scene=scene, checkpoint_every_steps=2)
    found = train(tmp_path / "parts", FSDP, resume=True, checkpoint_every_steps=2)
    assert found[0]["resumed_from_step"] == 4
    assert found[0]["notices"] == []
    assert digest(tmp_path / "parts" / "model.pt") == digest(tmp_path / "whole" / "model.pt")


def test_it_goes_on_with_any_number_of_ranks_with_and_without_it(train, tmp_path):
    train(tmp_path / "alone", None, ranks=1, job="steady")
    run, told = tmp_path / "run", []
    stops = ((2, FSDP, 2), (3, FSDP, 4), (1, None, 5), (2, DDP, 7), (2, FSDP, 9))
    for ranks, plan, steps in stops:
        resume = (run / "checkpoints").exists()
        found = train(run, plan, ranks=ranks, job="steady", resume=resume, max_steps=steps)
        assert found[0]["steps"] == steps
        told += found[0]["notices"]
    assert "world_size 2 -> 3" in told[0]
    assert "- fsdp" in told[1]
    assert "+ ddp" in told[2]
    assert "- ddp, + fsdp" in told[3]
    assert all(text.startswith("resumed, not bit-exact: ") for text in told)
    one, other = (torch.load(path / "model.pt") for path in (tmp_path / "alone", run))
    assert one.keys() == other.keys()
    for name, value in one.items():
        if name != "seen":  # of rank 0's share of a batch
            assert torch.allclose(other[name], value, rtol=1e-3, atol=1e-5), name


def test_no_memory_on_one_rank_ends_the_run_on_both_and_keeps_the_checkpoint(train, tmp_path):
    scene = {"environment": {"OUT_OF_MEMORY": "4", "FAILING_RANK": "1"}}
    found = train(tmp_path / "run", FSDP, wanted=1, scene=scene, checkpoint_every_steps=2)
    texts = [answer["error"]["message"] for answer in found]
    assert all(
        "it cannot be taken again, though the last checkpoint stands: what may fit is a plan with checkpoint"
        in text
        for text in texts
    )
    assert train(tmp_path / "run", FSDP, resume=True)[0]["resumed_from_step"] == 2


def test_a_number_that_is_not_finite_takes_both_back(train, tmp_path):
    scene = {"environment": {"NOT_FINITE": "4", "FAILING_RANK": "1"}}
    found = train(tmp_path / "run", FSDP, scene=scene, checkpoint_every_steps=2)
    assert all("back to step 2; from here on every number is checked" in one["notices"][0] for one in found)


@pytest.mark.fault(11)
def test_a_lost_rank_leaves_the_last_checkpoint(launch_ranks, tmp_path):
    """Its parts of the weights are lost: those that are left save nothing."""
    arguments = {"out": str(tmp_path / "run"), "checkpoint_every_steps": 2}
    scene = {"environment": {"DIES_AFTER": "5"}, "file": DIVIDED, "plan": FSDP}
    children = launch_ranks("job", arguments, **scene)
    assert [child.wait() for child in children] == [1, -9]
    text = children[0].answer["error"]["message"]
    assert "rank 1" in text
    assert text.endswith("go on from the last checkpoint with --resume")
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {"step_2", "step_4"}


def test_several_ranks_are_told_of_both_ways():
    plan = vivace.Plan.from_dict({"fsdp": {}, "micro_batches": {}})
    assert for_so_many(plan, 2) == plan
    assert for_so_many(plan, 1).names == ("micro_batches",)


@pytest.mark.slow
@pytest.mark.fault(7)
def test_a_launch_of_torchrun_stops_and_resumes_bit_for_bit(train, forked_torchrun, tmp_path, digest):
    train(tmp_path / "whole", FSDP)
    (tmp_path / "fsdp.toml").write_text(FSDP)
    words = ["train", f"{DIVIDED}:job", "--plan", str(tmp_path / "fsdp.toml"), "--out", str(tmp_path / "run")]
    for more, stops_after, wanted in (((), "3", 1), (("--resume",), "", 0)):
        code, _, errors = forked_torchrun([*words, *more], STOPS_AFTER=stops_after)
        assert code == wanted, errors  # torchrun's own is 1, for any other than 0
    found = json.loads((tmp_path / "run" / "run.json").read_text())
    assert 3 <= found["resumed_from_step"] < 9
    assert found["notices"] == []
    assert digest(tmp_path / "run" / "model.pt") == digest(tmp_path / "whole" / "model.pt")
