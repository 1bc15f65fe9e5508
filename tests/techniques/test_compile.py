from __future__ import annotations

import pytest
import torch

import vivace
from vivace.ledger import Observation
from vivace.mechanisms.blocks import find_blocks
from vivace.techniques.compile import Compile


@pytest.fixture
def counters():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch._dynamo.utils.counters


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("cnn", {"compile": {}}),
        ("text", {"compile": {"regional": True}}),
        ("text", {"compile": {}, "bf16_weights": {}}),
        ("mlp", {"compile": {}, "bf16_autocast": {}, "micro_batches": {"num": 2}}),
    ],
)
def test_it_trains_the_same_model_up_to_rounding(tiny, counters, kind, plan):
    job = tiny(kind)
    losses, weights = job.train(plan)
    assert counters["stats"]["unique_graphs"] > 0
    assert not counters["graph_break"]
    expected, reference = job.train({})
    rough = len(plan) > 1
    assert losses == pytest.approx(expected, rel=0.02 if rough else 1e-4)
    assert job.displacement_error(weights, reference) < (0.1 if rough else 1e-3)


@pytest.mark.slow
def test_nothing_is_left_behind(tiny, counters):
    job = tiny("text")
    limit = torch._dynamo.config.recompile_limit
    with job.open({"compile": {"regional": True}}) as session:
        session.step(job.batches[0])
        assert all(module._compiled_call_impl is None for module in session.model.modules())
        graphs = counters["stats"]["unique_graphs"]
        session.model(job.batches[0])
        assert counters["stats"]["unique_graphs"] == graphs, "between steps the model runs uncompiled"
    assert torch._dynamo.config.recompile_limit == limit
    assert not any("_compiled_call_impl" in vars(module) for module in session.model.modules())


@pytest.mark.slow
def test_an_own_step_is_compiled_too(counters):
    model = torch.nn.Linear(3, 1)

    def step(batch):
        loss = model(batch).square().mean()
        loss.backward()
        return loss.detach()

    with vivace.attach(vivace.Plan.from_dict({"compile": {}}), step=step, models=[model]) as session:
        session.step(torch.ones(2, 3))
    assert counters["stats"]["unique_graphs"] == 1
    assert model.weight.grad is not None


@pytest.mark.fault(38)
def test_a_failure_names_compilation(tiny, counters, monkeypatch):
    def broken(*_, **__):
        raise ValueError("no kernel")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", broken)
    job = tiny("mlp")
    with job.open({"compile": {}}) as session, pytest.raises(RuntimeError, match=r"torch.compile failed"):
        session.step(job.batches[0])


def test_refusals(tiny, monkeypatch):
    job = tiny("mlp")
    with pytest.raises(vivace.Refused, match="no block of the model is repeated"):
        job.open({"compile": {"regional": True}})
    job.original[0].compile()
    compiled = torch.compile(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    plan = vivace.Plan.from_dict({"compile": {}})
    with pytest.raises(vivace.Refused, match="compiled already"):
        vivace.attach(plan, model=compiled, optimizer=optimizer, loss=lambda m, b: m(b).sum())
    with pytest.raises(vivace.Refused, match="compiled already"):
        vivace.attach(plan, model=job.original, optimizer=optimizer, loss=job.loss)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(vivace.Refused, match="C\\+\\+ compiler"):
        tiny("mlp").open({"compile": {}})


class AsAttributes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("first", "second", "third", "fourth"):
            setattr(self, name, torch.nn.TransformerEncoderLayer(8, 2, 16))


def vision_transformer(models):
    return models.VisionTransformer(32, 16, num_layers=4, num_heads=2, hidden_dim=8, mlp_dim=16)


@pytest.mark.parametrize(
    ("make", "number"),
    [
        (lambda models: models.resnet18(), 8),
        (lambda models: models.densenet121(), 61),
        (vision_transformer, 4),
        (lambda _: AsAttributes(), 4),
    ],
    ids=["resnet18", "densenet121", "vision_transformer", "as_attributes"],
)
def test_regional_compiles_the_blocks_that_memory_is_decided_for(monkeypatch, make, number):
    model = make(pytest.importorskip("torchvision").models)
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda call, **_: compiled.append(call.__self__) or call)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = vivace.Plan.from_dict({"compile": {"regional": True}})
    with vivace.attach(plan, model=model, optimizer=optimizer, loss=lambda m, b: m(b).sum()):
        pass
    assert len(compiled) == number
    assert compiled == [module for block in find_blocks([model]) for module in block.modules]


def test_only_modes_that_capture_take_the_slot():
    assert Compile().slot is None
    assert Compile(mode="reduce-overhead").slot == "capture"
    plan = vivace.Plan.from_dict({"cuda_graph_step": {}}).adding(Compile(mode="reduce-overhead"))
    assert plan.names == ("compile",)


def test_confirmation_needs_graphs():
    nothing = Observation({}, {}, 0, 0.0)
    with pytest.raises(vivace.Refused, match="changed nothing"):
        Compile().confirm(nothing, nothing)
    seen = Observation({}, {}, 0, 0.0, compiled_graphs=2, graph_breaks=1)
    assert Compile().confirm(seen, nothing) == "2 compiled graphs, 1 graph break"


def test_what_comes_out_of_a_replay_is_a_copy(monkeypatch):
    """A mode that records CUDA graphs writes the next step's loss over this one's."""
    static = torch.zeros(())
    model = torch.nn.Linear(1, 1)

    def loss(model, batch):
        with torch.no_grad():
            static.fill_(float(batch))
        return static + 0.0 * model(batch).sum() if batch < 0 else static.requires_grad_()

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    plan = vivace.Plan([Compile(mode="reduce-overhead")])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with vivace.attach(plan, model=model, optimizer=optimizer, loss=loss) as session:
        first = session.step(torch.ones(1))
        session.step(2 * torch.ones(1))
    assert float(first) == 1.0


@pytest.mark.slow
def test_strict_numerics_are_nearer_to_torchs_own_kernels(counters):
    """Between two fused operators in bfloat16 the compiler keeps fp32, unless it is strict."""
    numbers = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 64, generator=numbers).bfloat16()

    class Fused(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))

        def forward(self, batch):
            return torch.nn.functional.gelu(batch * self.weight + batch) * batch

    def outputs(plan):
        found, model = [], Fused()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss(model, batch):
            found.append(model(batch))
            return found[0].float().mean()

        with vivace.attach(
            vivace.Plan.from_dict(plan), model=model, optimizer=optimizer, loss=loss
        ) as session:
            session.step(inputs)
        return found[0].detach()

    expected = outputs({})
    others = [int((outputs({"compile": how}) != expected).sum()) for how in ({}, {"strict": True})]
    assert 0 <= others[1] < others[0] / 4


def test_only_what_is_not_strict_yet_has_stricter_settings():
    stricter = Compile(regional=True).stricter()
    assert stricter == Compile(regional=True, strict=True)
    assert stricter.stricter() is None
