from __future__ import annotations

import pytest
import torch

import vivace
from vivace.errors import PlanError
from vivace.technique import Stage, registry
from vivace.testing.jobs import TINY_JOBS

SCENE = """
import torch
from torch import nn
from torch.nn import functional

import vivace
from vivace.inspection import inspect
from vivace.session.opening import start
from vivace.training.resuming import state_of


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.outer(functional.gelu(self.inner(self.norm(x))))


class Net(nn.Module):
    def __init__(self, tied=False, recurrent=False):
        super().__init__()
        self.first, self.last = nn.Linear(6, 7), nn.Linear(7, 5)
        self.blocks = nn.ModuleList(Block(7) for _ in range(3))
        self.middle = nn.LSTM(7, 7) if recurrent else nn.Identity()
        if tied:
            self.blocks[2].outer.weight = self.blocks[0].outer.weight

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def convolutions():  # blocks that are runs of modules, one of which ends in a view
    first = nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 3, 2), nn.Flatten()
    second = nn.ReLU(inplace=True), nn.Identity(), nn.Identity()
    return nn.Sequential(*first, *second, nn.BatchNorm1d(6), nn.Linear(6, 7), nn.Linear(7, 5))


def data():
    generator = torch.Generator().manual_seed(7)
    for _ in range(4):
        yield torch.randn(8, 6, generator=generator), torch.randint(5, (8,), generator=generator)


norms = []


def clip(model):
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))


def clip_by_hand(model):
    largest = max(p.grad.norm().item() for p in model.parameters())
    for parameter in model.parameters():
        parameter.grad /= largest


def train(plan, model=Net, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), on_gradients=clip):
    losses = []
    norms.clear()
    job = vivace.Job(
        model=model,
        data=data,
        loss=lambda m, b: functional.cross_entropy(m(b[0]), b[1]),
        optimizer=lambda m: optimizer(m.parameters()),
        on_gradients=on_gradients,
    )
    with start(job, vivace.Plan.from_dict(plan), inspect()) as session:
        keys = list(session.model.state_dict())
        ranks = session.build.facts.ranks or 1
        share = slice(RANK * 8 // ranks, (RANK + 1) * 8 // ranks) if ranks > 1 else slice(None)
        for x, y in data():
            losses.append(float(session.step((x[share], y[share]))))
        assert all(p.grad is None for p in session.model.parameters())
        states, shards = (state_of(session.model), state_of(session.optimizer)), session.build.shards
        held = sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in session.model.parameters())
        if shards is not None:
            states = shards.gathered(states, keep=True)
            with session.whole(), torch.no_grad():
                assert all(type(p) is nn.Parameter for p in session.model.parameters())
                outputs = session.model(x)
        else:
            outputs = session.model(x).detach()
    assert list(states[0]) == keys
    return {"states": states, "losses": losses, "norms": list(norms), "outputs": outputs, "held": held}


def refusal(plan, **changes):
    try:
        train(plan, **changes)
    except (vivace.Refused, vivace.JobError) as error:
        return str(error)


pairs = {
    "sgd": ({}, {}),
    "pieces": ({"micro_batches": {"num": 2}}, {}),
    "recomputed": ({"checkpoint": {}}, {}),
    "bf16": ({"bf16_autocast": {}}, {}),
    "fused": ({"fused_optimizer": {}}, {"optimizer": lambda p: torch.optim.AdamW(p, lr=0.01)}),
    "adam": ({}, {"optimizer": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True)}),
    "nadam": ({}, {"optimizer": lambda p: torch.optim.NAdam(p, lr=0.01)}),
    "rms": ({}, {"optimizer": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5)}),
    "runs": ({}, {"model": convolutions}),
}
found = {
    name: [train({way: {}, **more}, **changes) for way in ("ddp", "fsdp")]
    for name, (more, changes) in pairs.items()
}
found["refused"] = {
    "tied": refusal({"fsdp": {}}, model=lambda: Net(tied=True)),
    "recurrent": refusal({"fsdp": {}}, model=lambda: Net(recurrent=True)),
    "number": refusal({"fsdp": {}}, model=lambda: nn.ParameterList([torch.ones(())])),
    "types": refusal({"fsdp": {}}, model=lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())),
    "order": refusal({"fsdp": {}}, model=lambda: nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)),
    "optimizer": refusal({"fsdp": {}}, optimizer=torch.optim.Adagrad),
    "number of a part": refusal({"fsdp": {}}, on_gradients=clip_by_hand),
    "compiled whole": refusal({"fsdp": {}, "compile": {}}),
    "copied weights": refusal({"fsdp": {}, "bf16_weights": {}}),
    "untried": refusal({"fsdp": {}, "optimizer_in_backward": {}}),
    "unlike": refusal({"fsdp": {}}, model=lambda: nn.Linear(6, 3 + RANK)),
}
"""


@pytest.fixture(scope="module")
def found(on_two_ranks, tmp_path_factory):
    """What each of two ranks says."""
    return on_two_ranks(SCENE, tmp_path_factory.mktemp("ranks"))


NAMES = ("sgd", "pieces", "recomputed", "bf16", "fused", "adam", "nadam", "rms", "runs")


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_train_what_ddp_trains(found, name):
    (ddp, first), (_, second) = found[0][name], found[1][name]
    assert first["losses"] == second["losses"]
    assert first["losses"] == pytest.approx(ddp["losses"], rel=1e-5)
    assert first["norms"] == pytest.approx(ddp["norms"], rel=1e-5)
    assert torch.allclose(first["outputs"], ddp["outputs"], rtol=1e-4, atol=1e-5)
    for key, wanted in ddp["states"][0].items():
        assert torch.allclose(first["states"][0][key], wanted, rtol=1e-4, atol=1e-5), key
        if "running" not in key:  # each rank's share moves its own, until rank 0's are sent
            assert torch.equal(first["states"][0][key], second["states"][0][key]), key
    for number, state in ddp["states"][1]["state"].items():
        for key, wanted in state.items():
            assert torch.allclose(first["states"][1]["state"][number][key], wanted, rtol=1e-4, atol=1e-5)


def test_each_rank_holds_its_part(found):
    whole = found[0]["sgd"][0]["held"]
    assert [rank["sgd"][1]["held"] < 0.6 * whole for rank in found] == [True, True]
    assert sum(rank["sgd"][1]["held"] for rank in found) == whole


def test_what_it_cannot_divide_is_refused_by_name(found):
    assert found[0]["refused"] == found[1]["refused"]
    refused = found[0]["refused"]
    assert (
        refused["tied"]
        == "fsdp: the weight 'blocks.0.outer.weight' is shared between two blocks of the model"
    )
    assert "a recurrent layer holds its weights in a list of its own" in refused["recurrent"]
    assert "the weight '0' is a single number" in refused["number"]
    assert "of several types (torch.float32, torch.float64)" in refused["types"]
    assert "the weight 'weight' does not lie in memory in its own order" in refused["order"]
    assert "Adagrad has not been tried on parts of weights: SGD, Adam, AdamW" in refused["optimizer"]
    assert "on_gradients reads a number (.item(), float(), an if)" in refused["number of a part"]
    assert "the ranks have different models" in refused["unlike"]
    assert "gathered and compiled singly: set regional = true" in refused["compiled whole"]
    assert refused["copied weights"] == (
        "bf16_weights: it copies all weights before the forward pass, and a rank that holds a part of them "
        "has those of one block at a time: use bf16_autocast"
    )
    assert refused["untried"] == (
        "optimizer_in_backward: it has not been tried on weights that are divided among the ranks"
    )


def test_one_process_and_an_own_loop_are_refused(tmp_path):
    with pytest.raises(vivace.Refused, match=r"^fsdp: only one process runs.*torchrun --nproc-per-node N"):
        vivace.train(TINY_JOBS["mlp"](), vivace.Plan.from_dict({"fsdp": {}}), out=tmp_path / "run")
    model = torch.nn.Linear(2, 2)
    with pytest.raises(vivace.Refused, match=r"^fsdp: in a loop of your own.*use vivace.train"):
        vivace.attach(
            vivace.Plan.from_dict({"fsdp": {}}),
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loss=lambda m, b: m(b).sum(),
        )


def test_it_stands_in_the_place_of_ddp():
    with pytest.raises(PlanError, match="exclude each other"):
        vivace.Plan.from_dict({"fsdp": {}, "ddp": {}})
    plan = vivace.Plan.from_dict({"ddp": {}, "micro_batches": {}})
    assert plan.adding(registry.find("fsdp")()).names == ("fsdp", "micro_batches")


def test_what_sees_weights_must_say_that_it_was_tried():
    able = {cls.name for cls in registry.everything() if cls.card.acts_on_shards}
    fed = {cls.name for cls in registry.everything() if cls.card.stage <= Stage.DATA}
    assert able - fed == {
        "fsdp",
        "micro_batches",
        "checkpoint",
        "bf16_autocast",
        "fused_optimizer",
        "compile",
    }
