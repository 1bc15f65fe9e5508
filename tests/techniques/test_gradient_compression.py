from __future__ import annotations

import pytest
import torch

import vivace
from vivace.technique import registry
from vivace.testing import TechniqueContract

GradientCompression = registry.find("gradient_compression")

SCENE = """
import torch
import vivace


def train(plan, rank, ranks):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 32), torch.nn.Tanh(), torch.nn.Linear(32, 5))
    keys, seen = list(model.state_dict()), []
    session = vivace.attach(
        vivace.Plan.from_dict(plan),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda m, b: torch.nn.functional.cross_entropy(m(b[0]), b[1]),
        on_gradients=lambda m: seen.append([p.grad.clone() for p in m.parameters()]),
    )
    generator = torch.Generator().manual_seed(7)
    losses = []
    with session:
        for _ in range(12):
            x, y = torch.randn(8, 40, generator=generator), torch.randint(5, (8,), generator=generator)
            share = slice(rank * 8 // ranks, (rank + 1) * 8 // ranks)
            losses.append(float(session.step((x[share], y[share]))))
        promise, share = session.promise.name, session.build.facts.exchanged_share
    assert list(model.state_dict()) == keys
    return {"gradients": seen, "losses": losses, "promise": promise, "share": share}


hook = "gradient_compression"
found = {
    "plain": train({"ddp": {}}, RANK, 2),
    "bf16": train({"ddp": {}, hook: {}}, RANK, 2),
    "powersgd": train({"ddp": {}, hook: {"method": "powersgd", "rank": 1, "exact_steps": 4}}, RANK, 2),
}
"""


class TestGradientCompression(TechniqueContract):
    technique = GradientCompression


def difference(left, right):
    return max(float((a - b).norm() / b.norm()) for a, b in zip(left, right, strict=True))


def test_two_ranks_agree_and_stay_near_the_exact_exchange(on_two_ranks, tmp_path):
    first, second = on_two_ranks(SCENE, tmp_path)
    for name in ("plain", "bf16", "powersgd"):
        assert first[name]["losses"] == second[name]["losses"]
        for mine, theirs in zip(first[name]["gradients"], second[name]["gradients"], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    plain, rounded, low = (first[name] for name in ("plain", "bf16", "powersgd"))
    assert 0 < difference(rounded["gradients"][0], plain["gradients"][0]) < 2 * 2**-8
    assert rounded["losses"][-1] == pytest.approx(plain["losses"][-1], rel=0.02)
    assert (rounded["promise"], rounded["share"]) == ("ROUNDING", 0.5)
    assert difference(low["gradients"][2], plain["gradients"][2]) == 0  # the exact steps
    assert difference(low["gradients"][6], plain["gradients"][6]) > 0.05
    assert low["losses"][-1] == pytest.approx(plain["losses"][-1], rel=0.3)
    assert low["promise"] == "SEMANTICS"
    assert low["share"] < 0.2


def test_without_an_exchange_it_is_refused(tiny):
    with pytest.raises(vivace.Refused, match="it needs the technique ddp beside it"):
        tiny("mlp").open({"gradient_compression": {}})


def test_what_the_hook_sends_whole_counts_whole():
    """torch compresses a matrix that gets less than half as large, at a rank that its sides allow."""
    low = GradientCompression(method="powersgd", rank=4)
    sizes = {(16, 16): 256, (64, 64): 2 * 64 * 4, (2, 4096): 2 * 4096, (1000,): 1000}
    for size, sent in sizes.items():
        module = torch.nn.Module()
        module.register_parameter("one", torch.nn.Parameter(torch.zeros(size)))
        assert low._sent(module) == sent, size
