import copy
import dataclasses

import pytest
import torch

import vivace
from vivace.ledger import Observation
from vivace.technique import registry
from vivace.techniques.offload_optimizer.hosted import HostedState
from vivace.testing import TechniqueContract

from . import blocky

OffloadOptimizer = registry.find("offload_optimizer")
PLAN = {"offload_optimizer": {}}


@pytest.mark.usefixtures("one_thread")
class TestOffloadOptimizer(TechniqueContract):
    technique = OffloadOptimizer


@pytest.fixture
def anywhere(monkeypatch):
    """Let the technique act on a CPU, whose "host" memory is a copy: the logic without the streams."""
    card = dataclasses.replace(OffloadOptimizer.card, devices=("cpu", "cuda"))
    monkeypatch.setattr(OffloadOptimizer, "card", card)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-2)


def test_a_cpu_has_nowhere_to_offload_to():
    with pytest.raises(
        vivace.Refused, match=r"^offload_optimizer: it acts on cuda, and this job runs on cpu"
    ):
        blocky.opened(PLAN)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("make", [None, adam])
@pytest.mark.parametrize("beside", [{}, {"fp16_autocast": {}}, {"checkpoint": {}}])
def test_no_bit_differs(make, beside):
    seen, notes = blocky.course({**beside, **PLAN}, make=make)
    wanted, _ = blocky.course(beside, make=make)
    assert blocky.differing(seen, wanted) == []
    weights = sum(p.numel() * p.element_size() for p in blocky.ORIGINAL.parameters() if p.numel() > 1)
    assert notes["hosted_bytes"] == weights * (2 if make else 1)


@pytest.mark.parametrize("part_bytes", [1, 400, 10**9])
def test_state_is_on_the_device_for_one_part_at_a_time_and_saves_and_loads(part_bytes):
    torch.manual_seed(0)
    models = [torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [adam(model.parameters()) for model in models]
    hosted = HostedState(optimizers[1], torch.device("cpu"), part_bytes)

    def step(number, gradients):
        for model in models:
            for p, g in zip(model.parameters(), gradients, strict=True):
                p.grad = g.clone()
        optimizers[0].step()
        hosted.update()

    draws = [[torch.randn_like(p) for p in models[0].parameters()] for _ in range(4)]
    for number in range(2):
        step(number, draws[number])
    saved = copy.deepcopy(optimizers[1].state_dict())
    step(2, draws[2])
    for optimizer, model in zip(optimizers, models, strict=True):
        optimizer.load_state_dict(copy.deepcopy(saved))
        del model
    step(3, draws[3])
    hosted.close()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)
    assert not optimizers[1]._optimizer_state_dict_pre_hooks
    assert not optimizers[1]._optimizer_load_state_dict_post_hooks


@pytest.mark.usefixtures("anywhere")
def test_optimizers_that_look_at_all_parameters_are_refused():
    with pytest.raises(vivace.Refused, match="LBFGS may look at all parameters at once"):
        blocky.opened(PLAN, make=torch.optim.LBFGS)
    with pytest.raises(vivace.Refused, match="'offload_optimizer' already replaces the seam 'update'"):
        blocky.opened({**PLAN, "optimizer_in_backward": {}})


def test_confirmation_names_the_bytes():
    seen = Observation({}, {}, 0, 0.0, notes={"hosted_bytes": 3 * 2**19})
    assert OffloadOptimizer().confirm(seen, seen) == "1.50 MiB of optimizer state in the host's memory"
    with pytest.raises(vivace.Refused, match="keeps no state"):
        OffloadOptimizer().confirm(Observation({}, {}, 0, 0.0), seen)


def test_an_optimizer_whose_state_finds_no_room_is_left_as_it_was(monkeypatch):
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.ones(4)
    optimizer.step()

    def full(*_, **__):
        raise MemoryError("no page-locked memory")

    monkeypatch.setattr(torch, "empty_like", full)
    with pytest.raises(MemoryError):
        HostedState(optimizer, torch.device("cpu"), 1)
    optimizer.load_state_dict(optimizer.state_dict())
