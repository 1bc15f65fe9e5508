"""What the layers of a model return, and which values of a traced program that is."""

import numpy
import pytest
import torch
from torch import nn

from vivace.errors import Refused
from vivace.serving.calls import Calls, Flat
from vivace.serving.envelope import run
from vivace.serving.forms import BY_NAME
from vivace.serving.layers import Heard, Layers, few_calls
from vivace.serving.material import Material


class Net(nn.Module):
    """Layers that write in place, are called twice, return several tensors, or do nothing."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.act = nn.Linear(6, 6), nn.ReLU(inplace=True)
        self.rnn = nn.GRU(6, 6, batch_first=True)
        self.rest = nn.Sequential(nn.Identity(), nn.Linear(6, 2))

    def forward(self, x):
        x = self.act(self.first(x))
        x = self.act(self.first(x) + x)
        return self.rest(self.rnn(x)[0])


@pytest.fixture
def calls():
    stream = numpy.random.default_rng(0)
    arrays = [[stream.standard_normal((8, 4, 6)).astype(numpy.float32)] for _ in range(2)]
    return Calls(arrays, ((0,),), (1, 1), (8, 8))


@pytest.fixture
def flat():
    return Flat(Net(), ((torch.ones(1, 4, 6),), {})).eval()


def test_layers_are_told_in_the_order_in_which_they_end(flat, calls):
    heard = Heard(flat)
    returned = run(heard, calls.inputs[0])
    found = dict(zip(heard.names, returned, strict=True))
    assert heard.names == [
        "first",
        "act",
        "first (call 2)",
        "act (call 2)",
        "rnn[0]",
        "rnn[1]",
        "rest.1",
    ]
    assert (found["first"] < 0).any()  # as it was before it was changed in place
    assert (found["act"] >= 0).all()


def test_a_program_has_the_values_of_all_layers(flat, calls):
    few = few_calls(calls)
    assert [len(arrays[0]) for arrays in few] == [1, 2, 3]
    layers = Layers(flat, Material(flat, calls, calls), BY_NAME["eager_fp32"], few)
    assert layers.calls == 3
    by_name = dict(zip(layers.names, layers.values, strict=True))
    assert all(by_name.values())
    assert not set(by_name["first"]) & set(by_name["first (call 2)"])
    (check,) = layers.checks([[arrays[1] * 1.01] for arrays in layers.expected], [1])
    assert (check.output, check.kept) == ("act", False)
    (check,) = layers.checks([[arrays[1] * (1 + 1e-7)] for arrays in layers.expected], [1])
    assert check.kept


def test_layers_that_depend_on_the_sample_cannot_be_compared(calls):
    class Choosing(Net):
        def forward(self, x):
            return super().forward(x) if len(x) > 1 else self.rest(x)

    heard = Heard(Flat(Choosing(), ((torch.ones(1, 4, 6),), {})).eval())
    one, two, _ = few_calls(calls)
    run(heard, one)
    with pytest.raises(Refused, match="other layers for some of your samples"):
        run(heard, two)
