"""A forward that was traced follows what its code reads beside tensors, wherever that lies."""

import copy
import types

import pytest
import torch
from torch import nn

from vivace.mechanisms.graphs import MOST_TRACES, Change, add_change

FACTOR = 1.0


class Scales(nn.Module):
    """By numbers that lie in many places."""

    def __init__(self):
        super().__init__()
        self.own, self.listed, self.named = 1.0, [[1.0]], {"factor": 1.0}
        self.settings, self.part = types.SimpleNamespace(factor=1.0), nn.Identity()
        self.part.factor = 1.0
        self.layers = nn.ModuleList([nn.Identity()])

    @property
    def held(self):
        return self.settings.factor

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.scaled(x) * self.own * FACTOR

    def scaled(self, x):
        return x * self.listed[0][0] * self.named["factor"] * self.held * self.part.factor


def set_outside(_):
    globals()["FACTOR"] = 3.0


def set_listed(model):
    model.listed[0][0] = 3.0


CHANGES = {
    "own": lambda model: setattr(model, "own", 3.0),
    "in a list": set_listed,
    "in a dict": lambda model: model.named.update(factor=3.0),
    "in an object": lambda model: setattr(model.settings, "factor", 3.0),
    "in a part": lambda model: setattr(model.part, "factor", 3.0),
    "outside": set_outside,
    "another part": lambda model: model.layers.append(nn.Linear(1, 1)),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_a_traced_forward_follows_what_is_changed(monkeypatch, name, compiled):
    monkeypatch.setitem(globals(), "FACTOR", 1.0)
    model, x = Scales(), torch.ones(2, 1)
    undo = add_change(model, Change(0, lambda *_: ["anything"], lambda *_: None))
    torch._dynamo.reset()
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    assert torch.equal(run(x), x)
    CHANGES[name](model)
    copied, found = copy.deepcopy(model), run(x)
    assert torch.equal(copied(x), found)
    undo()
    assert torch.equal(model(x), found)
    assert not torch.equal(found, x)


def test_a_forward_whose_numbers_change_at_every_call_is_not_traced_for_ever():
    model, x, traced = Scales(), torch.ones(2, 1), []
    add_change(model, Change(0, lambda *_: ["anything"], lambda *given: traced.append(given)))
    for step in range(MOST_TRACES + 9):
        model.named["factor"] = 1.0 + step
        assert torch.equal(model(x), (1.0 + step) * x)
    assert len(traced) == MOST_TRACES


def test_a_variable_of_the_file_that_has_the_name_of_an_attribute_is_none_of_the_forwards(monkeypatch):
    monkeypatch.setitem(globals(), "own", 0.0)
    model, x, traced = Scales(), torch.ones(2, 1), []
    add_change(model, Change(0, lambda *_: ["anything"], lambda *given: traced.append(given)))
    for step in range(3):
        globals()["own"] = float(step)
        model(x)
    assert len(traced) == 1
