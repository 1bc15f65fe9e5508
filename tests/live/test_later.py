"""What helps only once a model has been trained for a while is looked for anew, also where nothing acts."""

import pytest
import torch
from torch import nn

from vivace.live import candidates, course
from vivace.tensors.denormals import are_flushed


def train(steps=1500):
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        inputs, labels = torch.randn(12, 8, generator=generator), torch.randint(3, (12,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return model


@pytest.fixture
def led(led, monkeypatch):
    """Where it may be looked for, however short the run is."""
    monkeypatch.setattr(course, "later", candidates.later)
    monkeypatch.setattr(course, "LATER", 0.0)
    monkeypatch.setattr(course, "LATER_SECONDS", 0.0)
    monkeypatch.setattr(course, "PASSING_SHARE", 1e9)
    return led


def in_plans(document):
    return [name for entry in document["tried"] for name in entry["plan"]]


@pytest.mark.parametrize("others", [[], ["fused_optimizer"]])
def test_what_helps_by_now_joins_the_plan_that_acts(led, others):
    alone = train()
    factors = {"flush_denormals": 0.5} | dict.fromkeys(others, 0.8)
    loop, model, document = led(train, *factors, factors=factors)
    assert sorted(document["plan"]) == sorted(factors)
    assert not loop.problems
    assert loop.conductor.course.plan_steps > 20
    assert not are_flushed()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.0, atol=2e-3)


def test_what_acts_after_a_plan_that_was_taken_back_has_figures_of_its_own(led):
    factors = {"fused_optimizer": 1.0, "flush_denormals": 0.5}
    _, _, told = led(lambda: train(600), plan={"fused_optimizer": {}}, factors=factors)
    assert told["plan"] == {"flush_denormals": {}}
    assert told["ratio"]["estimate"] == pytest.approx(2.0)


def test_a_given_plan_has_its_own_figures_and_not_those_of_what_it_became(led):
    factors = {"fused_optimizer": 0.8, "flush_denormals": 0.5}
    _, _, told = led(lambda: train(600), plan={"fused_optimizer": {}}, factors=factors)
    assert sorted(told["plan"]) == sorted(factors)
    assert told["tried"][0]["wall"]["estimate"] == pytest.approx(1.25)


@pytest.mark.parametrize(("name", "value"), [("LATER", 1e9), ("LATER_SECONDS", 1e9), ("PASSING_SHARE", 0.0)])
def test_nothing_is_tried_where_a_copy_gains_nothing_or_looking_takes_too_long(led, monkeypatch, name, value):
    monkeypatch.setattr(course, name, value)
    loop, _, document = led(train, "flush_denormals")
    assert "flush_denormals" not in in_plans(document)
    assert loop.guard.off == (name != "LATER")  # every hook is gone


def test_a_run_whose_bits_must_be_equal_is_left_alone(led):
    torch.use_deterministic_algorithms(True)
    try:
        _, _, document = led(train, "flush_denormals")
    finally:
        torch.use_deterministic_algorithms(False)
    assert "flush_denormals" not in in_plans(document)
