"""What a training keeps in Python, outside of its weights: looked at, and put back."""

from functools import cached_property

import pytest
import torch
from torch import nn

from vivace.tensors.outside import Outside


class Counting:
    """Begins to count when it is first called, as many losses and hooks do."""

    def __call__(self, model, batch):
        self.calls = getattr(self, "calls", 0) + 1
        return model(batch).mean() * min(1.0, self.calls / 10)


class Slotted:
    __slots__ = ("calls",)

    def __init__(self):
        self.calls = 0


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Linear(2, 1)


def test_what_a_call_has_begun_to_keep_is_gone_again(model):
    """Else the same step, repeated under a plan, would begin with a count of one, and be another step."""
    loss, batch = Counting(), torch.ones(3, 2)
    before = Outside((loss,), [model])
    assert not before.moved()
    first = float(loss(model, batch).detach())
    assert before.moved()
    before.put_back()
    assert vars(loss) == {}
    assert float(loss(model, batch).detach()) == first
    between = Outside((loss,), [model])
    loss(model, batch)
    between.put_back()
    assert loss.calls == 1, "what was there stays, as it was"


def test_what_is_computed_once_is_computed_again(model):
    class Weights:
        @cached_property
        def of_classes(self):
            return torch.ones(2)

    weights = Weights()
    outside = Outside((lambda: weights.of_classes,), [model])
    first = weights.of_classes
    outside.put_back()
    assert weights.of_classes is not first


def test_values_that_were_there_come_back(model):
    counts, slotted, seen = {"calls": 0}, Slotted(), [torch.zeros(2)]

    def loss():
        counts["calls"] += 1
        counts["more"] = 1
        slotted.calls += 1
        seen[0].add_(1)
        seen.append(torch.ones(1))

    outside = Outside((loss,), [model])
    loss()
    assert outside.moved()
    outside.put_back()
    assert (counts, slotted.calls) == ({"calls": 0}, 0)
    assert [one.tolist() for one in seen] == [[0.0, 0.0]]
