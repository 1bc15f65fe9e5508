"""Processes that train one model with DistributedDataParallel: one decision for all, at the same step."""

import itertools

import pytest
import torch

SCENE = """
import contextlib
import json
import multiprocessing
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vivace.errors import Refused
from vivace.live import conductor, course, kept, ranks, spending
from vivace.live import loop as loop_module
from vivace.live.ending import tell
from vivace.live.errand import Errand
from vivace.live.loop import Loop
from vivace.live.pairs import Timing

multiprocessing.parent_process = lambda: None  # as torchrun starts it
kept.free_memory = lambda: 2**60
spending.SHARE, spending.PAYS = 1e9, 0.0
loop_module.SMALLEST_STEP_SECONDS = course.HOPELESS = course.SEGMENT_SECONDS = 0.0
own_hosted = conductor.Hosted
FOLDER = Path(__file__).parent


class Net(nn.Module):
    def __init__(self, odd):
        super().__init__()
        self.odd = odd
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(288, 5)
        )

    def forward(self, images):
        if self.odd == "exchanges":
            dist.all_reduce(torch.ones(1))
        hidden = self.body[0](images)
        if self.odd == "fails" and RANK and not hidden.is_contiguous():
            raise RuntimeError("this order is not what it expects")
        return self.body[1:](hidden)


def run(odd="", favoured=("channels_last",), plan=None, steps=120, led=True, patience=1e-9):
    spending.PATIENCE = patience
    out = FOLDER / f"{odd}{len(favoured)}{plan}"
    out.mkdir(exist_ok=True)
    watching, acted, opened = Loop(Errand(str(out), "runs/run", "train.py", plan), tell=tell), [], []
    watching.say = lambda line: None

    def acting():
        leading = watching.conductor
        return () if leading is None or leading._acting is None else leading._acting.plan.names

    def timing(wall, cpu):
        fast = 0.5 if any(name in favoured for name in acting()) else 1.0
        return Timing(fast, fast)

    def hosted(plan, *others, **named):
        if odd == "refuses" and RANK and plan.techniques:
            raise Refused("it has no such kernels")
        opened.append(plan)
        return own_hosted(plan, *others, **named)

    conductor.Timing, conductor.Hosted = timing, hosted
    torch.manual_seed(0)
    model = Net(odd)
    groups = [dist.new_group([rank]) for rank in range(2)] if odd == "apart" else [None, None]
    wrapped = DistributedDataParallel(
        model, broadcast_buffers=odd != "uneven", process_group=groups[RANK]
    )
    optimizer = torch.optim.AdamW(wrapped.parameters(), 1e-3)
    data = torch.Generator().manual_seed(RANK)
    torch.manual_seed(RANK)
    led = led and not (odd == "missing" and RANK)
    if led:
        watching.install()
    own = (steps // 4 if odd == "uneven" and not RANK else steps)
    with wrapped.join() if odd == "uneven" else contextlib.nullcontext():
        for step in range(own):
            images, labels = torch.randn(4, 3, 8, 8, generator=data), torch.randint(5, (4,), generator=data)
            if odd == "evaluates" and not RANK and step % 3 == 0:
                model.eval()
                with torch.no_grad():
                    model(images)
                model.train()
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(images), labels).backward()
            acted.append(acting())
            optimizer.step()
    if led:
        watching.finish()
    dist.barrier()
    document = out / "run.json"
    return {
        "weights": {name: weight.detach().clone() for name, weight in model.named_parameters()},
        "acted": acted,
        "opened": len(opened),
        "problems": watching.problems,
        "left_alone": watching.left_alone,
        "document": json.loads(document.read_text()) if led and document.exists() else {},
    }




def run_impatient(odd):
    # What waits until this is over; a rank beside others may need a while to answer.
    before, ranks.PATIENCE_SECONDS = ranks.PATIENCE_SECONDS, 0.5
    try:
        return run(odd)
    finally:
        ranks.PATIENCE_SECONDS = before


found = {
    "found": run(steps=240),  # which of the candidates comes first is by their copies' times
    "evaluates": run("evaluates", steps=240),
    "fused": run(favoured=("fused_optimizer", "channels_last"), steps=240),
    "refuses": run("refuses"),
    "fails": run("fails"),
    "exchanges": run("exchanges", favoured=("fused_optimizer",)),
    "uneven": run_impatient("uneven"),
    "given": run(plan={"channels_last": {"weights": False}}, favoured=()),
    "compiles": run(plan={"compile": {}}),
    "waits": run(patience=1e9),
    "alone": run(favoured=(), led=False),
    "apart": run("apart"),
    "missing": run_impatient("missing"),
}
"""


@pytest.fixture(scope="module")
def found(on_two_ranks, tmp_path_factory):
    return on_two_ranks(SCENE, tmp_path_factory.mktemp("ranks"))


def both(found, case):
    first, second = (each[case] for each in found)
    for name, weight in first["weights"].items():
        assert torch.equal(weight, second["weights"][name]), name
    assert not second["problems"]
    assert not first["problems"]
    return first, second


@pytest.mark.parametrize("case", ["found", "evaluates"])
def test_what_the_first_finds_acts_on_all_at_the_same_steps(found, case):
    first, second = both(found, case)
    assert first["acted"] == second["acted"]
    assert () in first["acted"]
    assert "channels_last" in first["acted"][-1]
    assert first["document"]["outcome"] == "faster"
    assert first["document"]["processes"] == 2


def test_who_follows_opens_a_plan_only_where_it_begins_to_act(found):
    _, second = both(found, "found")
    changes = sum(before != after for before, after in itertools.pairwise(second["acted"]))
    assert second["opened"] <= changes + 1


def test_updates_change_on_all_at_the_same_step(found):
    first, second = both(found, "fused")
    assert first["acted"] == second["acted"]
    assert any("fused_optimizer" in names for names in first["acted"])


def test_a_plan_that_one_cannot_act_on_acts_on_none(found):
    first, second = both(found, "refuses")
    assert set(first["acted"]) == set(second["acted"]) == {()}
    assert first["document"]["reason"] == "process 1: it has no such kernels"


def test_a_model_that_fails_on_one_under_a_plan_trains_on_without(found):
    first, second = both(found, "fails")
    assert second["acted"][-1] == first["acted"][-1] == ()
    assert len(second["acted"]) == 120
    assert "process 1: its model failed under channels_last" in first["document"]["reason"]


def test_a_model_that_exchanges_is_not_run_again_by_one_alone(found):
    first, second = both(found, "exchanges")
    assert "exchanges tensors with other processes" in first["document"]["only_the_rest"]
    assert first["acted"] == second["acted"]
    assert set(first["acted"]) == {(), ("fused_optimizer",)}


def test_who_does_not_come_is_not_waited_for(found):
    first, second = both(found, "uneven")
    assert len(second["acted"]) == 120
    assert "did not come to step" in second["left_alone"] or "has ended" in second["left_alone"]
    assert len(first["acted"]) == 30


def test_a_process_that_vivace_did_not_start_is_missed(found):
    first, second = both(found, "missing")
    assert "1 of 2 processes" in first["document"]["reason"]
    assert set(first["acted"]) == set(second["acted"]) == {()}


def test_processes_that_train_models_of_their_own_are_left_alone(found):
    for each in found:
        assert set(each["apart"]["acted"]) == {()}
        assert "without DistributedDataParallel around it" in each["apart"]["left_alone"]


def test_a_given_plan_acts_on_all(found):
    first, second = both(found, "given")
    assert first["acted"] == second["acted"]
    assert ("channels_last",) in first["acted"]


def test_a_given_plan_that_compiles_is_refused(found):
    first, second = both(found, "compiles")
    assert "would have to compile its model" in first["document"]["reason"]
    assert set(second["acted"]) == {()}


def test_what_only_waits_to_begin_changes_no_bit(found):
    first, _ = both(found, "waits")
    alone, _ = both(found, "alone")
    assert "a search begins where at least" in first["document"]["reason"]
    assert all(torch.equal(weight, alone["weights"][name]) for name, weight in first["weights"].items())
