"""A model is compiled on copies of a step, once, in a long enough run, and then acts on its own steps."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import vivace
from vivace.live import candidates, spending
from vivace.live import compiling as module
from vivace.live.spending import Spending


class Net(nn.Module):
    """Draws random numbers, and has parts of a class of torch's own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.2))
        self.last = nn.Linear(16, 3)

    def forward(self, inputs):
        return self.last(self.layers(inputs))


def train(steps=220):
    """Two sizes of batches, and enough steps for all that may be tried before: memory, too, where the process
    that the tests run in takes more of it at each step.
    """
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        size = 5 if step % 7 == 6 else 12
        inputs = torch.randn(size, 8, generator=generator)
        labels = torch.randint(3, (size,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return model


@pytest.fixture
def compiler():
    """Counts of a compiler that has seen nothing."""
    torch.compiler.reset()
    counters.clear()
    yield counters
    torch.compiler.reset()


@pytest.mark.slow
def test_the_call_is_compiled_once_and_only_for_the_batches_that_were_proven(
    led, compiler, monkeypatch, capsys
):
    monkeypatch.setattr(spending, "COMPILING_SHARE", 1e9)
    monkeypatch.setattr(spending, "LATE", 1e9)  # also where others compute
    monkeypatch.setattr(candidates, "FEWEST_FAULTS", -1)
    loop, model, document = led(train, "compile")
    assert list(document["plan"]) == ["compile"], document["tried"]
    assert not loop.problems
    assert "vivace: compiling a copy of the model, once, for about " in capsys.readouterr().err
    assert compiler["stats"]["unique_graphs"] == 1  # of the copy, which the script's own model runs
    assert loop.spending.compiling > 0
    alone = train()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.0, atol=2e-3)

    loop, model, document = led(train, "compile", plan=document["plan"])  # the next time
    assert list(document["plan"]) == ["compile"]
    assert loop.conductor.course.plan_steps > 60
    assert compiler["stats"]["unique_graphs"] == 1


def test_a_model_that_is_compiled_wrongly_is_refused(led, compiler, monkeypatch):
    """Under rounding at random torch runs it as written, and right."""
    compile = torch.compile

    def doubling(module, inputs):
        return lambda *arguments: tuple(2 * output for output in module(*arguments))

    monkeypatch.setattr(torch, "compile", lambda model, **_: compile(model, backend=doubling))
    _, _, document = led(train, plan={"compile": {}})
    assert compiler["stats"]["unique_graphs"]
    assert "the plan is not kept here" in document["reason"]


def test_nothing_is_compiled_where_the_run_is_too_short_or_bits_must_be_equal(led, compiler, monkeypatch):
    loop, _, document = led(train, "compile")
    assert "compile" not in [name for entry in document["tried"] for name in entry["plan"]]
    assert loop.guard.off  # every hook is gone
    monkeypatch.setattr(spending, "COMPILING_SHARE", 1e9)
    monkeypatch.setattr(spending, "LATE", 1e9)  # also where others compute
    torch.use_deterministic_algorithms(True)
    try:
        _, _, document = led(train, "compile")
    finally:
        torch.use_deterministic_algorithms(False)
    assert "compile" not in [name for entry in document["tried"] for name in entry["plan"]]
    assert not compiler["stats"]["unique_graphs"]


def test_what_compiling_takes_is_told_as_slowly_as_the_machine_goes_now(monkeypatch):
    monkeypatch.setattr(module, "compiling_pace", lambda fingerprint: 1.0)
    monkeypatch.setattr(module, "Slowed", lambda: lambda: slowed[-1])
    slowed = [1.0]
    proof = SimpleNamespace(replay=lambda *_, **__: None, machine=vivace.inspect())
    compiling = module.Compiling(())
    assert compiling.seconds == float("inf")
    compiling.foretell(proof, SimpleNamespace(will_compile=lambda seconds: True))
    alone = compiling.seconds
    slowed.append(4.0)
    assert compiling.seconds == 4.0 * alone


def test_a_run_compiles_when_it_has_earned_that_and_a_search_while_it_has_time(turned):
    turned = turned()
    coming = [0.0]
    spent = Spending(turned.clock, coming=lambda: coming[0])
    turned.now += 100.0
    assert spent.compiles(1.9)
    assert not spent.will_compile(2.1)
    coming[:] = [1000.0]
    assert spent.compiles(9.9)  # four times what has passed counts of what is to come
    assert not spent.compiles(10.1)
    assert spent.will_compile(21.9)
    assert not spent.will_compile(22.1)
    before = spent.allowed(1.0)
    spent.compiling += 20.0
    assert spent.allowed(1.0) == pytest.approx(before + 20.0)
    searching = Spending(turned.clock, free_seconds=100.0)
    assert searching.will_compile(29.0)
    turned.now += 50.0
    assert not searching.will_compile(29.0)
    assert not searching.will_compile(float("inf"))
