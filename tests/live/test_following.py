"""Copies of models whose functions use their parts."""

import copy

import torch
from torch import nn

from vivace.live.following import copied


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        first, second, self.calls = self.first, self.second, []

        def inner(inputs, *, scale=2.0):
            return second(first(inputs)) * scale

        def defaults(inputs, part=second, calls=self.calls):
            calls.append(1)
            return part(inputs)

        def before_it_has_a_value():
            return later, first

        if False:
            later = None
        inner.note = "kept"
        self.inner, self.defaults, self.empty = inner, defaults, before_it_has_a_value
        call = self.first.forward  # as Lightning keeps the method that it puts another in the place of
        self.called = lambda inputs: call(inputs)
        self.plain = torch.relu
        self.itself = lambda inputs: self.inner(inputs)

    def forward(self, inputs):
        return self.itself(inputs) + self.defaults(self.plain(self.called(inputs)))


def test_functions_of_a_copy_use_its_own_parts():
    model, inputs = nn.Sequential(Block(), nn.Linear(4, 2)), torch.randn(3, 4)
    once, _ = copied((model, {"seen": 3}), model)
    twice = copied(once, once)
    for made in (once, twice):
        torch.testing.assert_close(made(inputs), model(inputs), rtol=0, atol=0)
        model.zero_grad(set_to_none=True)
        made(inputs).sum().backward()
        assert all(p.grad is None for p in model.parameters())
        assert all(p.grad is not None for p in made.parameters())
        block = made[0]
        assert (block.inner.note, block.inner.__kwdefaults__) == ("kept", {"scale": 2.0})
        assert block.inner.__qualname__ == model[0].inner.__qualname__
        assert block.plain is torch.relu
    assert once[0].first is not twice[0].first


def test_the_original_keeps_its_functions():
    model = Block()
    before = {name: value for name, value in vars(model).items() if callable(value)}
    copied(model, model)
    assert all(vars(model)[name] is value for name, value in before.items())
    assert copy.deepcopy(model).inner is model.inner  # which is why they are followed
