"""Outputs that differ by rounding are kept; others, wrong shapes and numbers that are not finite are not."""

import dataclasses
import warnings

import numpy
import pytest
import torch
from torch import nn

from vivace.serving.calls import Flat
from vivace.serving.envelope import ROUNDOFF, compare, distance, names_of, names_of_inputs, run, shadows
from vivace.tensors.trees import tensors


class Two(nn.Module):
    """One output after a product, and one before any."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 5))

    def forward(self, x):
        return self.layers(x), x.mean(1)


@pytest.fixture(scope="module")
def model():
    return Flat(Two(), ((torch.ones(1, 20),), {}))


@pytest.fixture(scope="module")
def calls():
    stream = numpy.random.default_rng(0)
    return [[stream.standard_normal((8, 20)).astype(numpy.float32)] for _ in range(3)]


def judged(model, calls, change, numbers="fp32"):
    expected = [run(model, arrays) for arrays in calls]
    width = shadows(model, calls, ROUNDOFF[numbers])
    return compare(expected, change(expected), width, ["logits", "mean"])


def test_another_order_of_sums_is_kept(model, calls):
    def doubly(expected):
        exact = Two().double()
        with torch.no_grad():
            return [[t.float().numpy() for t in exact(torch.from_numpy(x).double())] for (x,) in calls]

    checks = judged(model, calls, doubly)
    assert [check.kept for check in checks] == [True, True]
    assert max(check.envelopes for check in checks) < 1


def test_bfloat16_is_not_fp32_and_lies_within_its_own_envelope(model, calls):
    def rounded(expected):
        half = Two().bfloat16()
        with torch.no_grad():
            return [[t.float().numpy() for t in half(torch.from_numpy(x).bfloat16())] for (x,) in calls]

    assert not judged(model, calls, rounded)[0].kept
    assert judged(model, calls, rounded, "bf16")[0].kept


@pytest.mark.parametrize("place", [0, 1])
def test_a_small_change_of_one_output_is_found(model, calls, place):
    def scaled(expected):
        return [[a * (1.001 if k == place else 1.0) for k, a in enumerate(arrays)] for arrays in expected]

    checks = judged(model, calls, scaled)
    assert [check.kept for check in checks] == [place != 0, place != 1]
    assert checks[place].share == pytest.approx(0.001, rel=0.5)


def test_what_cannot_be_compared(model, calls):
    checks = judged(model, calls, lambda expected: [[a[:-1], b * numpy.nan] for a, b in expected])
    assert "shape" in checks[0].problem
    assert "not finite" in checks[1].problem
    (check,) = judged(model, calls, lambda expected: expected[:-1])
    assert "2 calls were answered of 3" in check.problem


def test_another_number_of_outputs_is_told(model, calls):
    checks = judged(model, calls, lambda expected: [arrays[:1] for arrays in expected])
    assert [check.problem for check in checks] == ["the model returns 2 tensors, and 1 came back"]


class Masked(nn.Module):
    """Some outputs are minus infinity, as those of a mask are, and none where there is no number."""

    def __init__(self):
        super().__init__()
        self.layers = Two().layers

    def forward(self, x):
        logits = self.layers(x)
        mask = torch.tensor([0.0, 0.0, 0.0, 0.0, -torch.inf])
        return logits + mask, torch.where(x[:, :5] > 0, logits, torch.nan)


def test_a_masks_infinities_are_compared_as_such(calls):
    model = Flat(Masked(), ((torch.ones(1, 20),), {}))
    assert all(numpy.isfinite(width) and width > 0 for width in shadows(model, calls, ROUNDOFF["fp32"]))
    assert [c.kept for c in judged(model, calls, lambda expected: expected)] == [True, True]
    checks = judged(model, calls, lambda expected: [[a * 1.001, b * 1.001] for a, b in expected])
    assert [check.kept for check in checks] == [False, False]
    checks = judged(model, calls, lambda expected: [[-a, numpy.nan_to_num(b)] for a, b in expected])
    assert [(check.kept, check.largest) for check in checks] == [(False, numpy.inf)] * 2


def test_the_imaginary_part_counts():
    one = numpy.array([1 + 1j, 2.0])
    assert distance([one], [one]) == 0.0
    assert distance([one], [one.conj()]) == pytest.approx(1.0)


@dataclasses.dataclass
class Answer:
    logits: torch.Tensor
    mean: torch.Tensor = dataclasses.field(init=False)


def test_every_tensor_has_a_name():
    found = Answer(torch.ones(2))
    for returned in (found, {"a": found, "b": None}):
        assert len(names_of(returned)) == len(list(tensors(returned))) == 1
    found.mean = torch.ones(1)
    assert names_of(found) == ["output.logits", "output.mean"]


def test_outputs_are_called_as_a_person_would_index_them():
    tensor = torch.ones(1)
    returned = {"logits": tensor, "states": (tensor, [tensor])}
    assert names_of(returned) == ["output['logits']", "output['states'][0]", "output['states'][1][0]"]


def test_inputs_have_the_names_of_forward():
    class Called(nn.Module):
        def forward(self, batch, *, scale):
            return batch["words"] * scale

    one = torch.ones(1, 2)
    given = (({"words": one, "mask": [one]},), {"scale": one})
    assert names_of_inputs(Called(), given) == ["batch['words']", "batch['mask'][0]", "scale"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will drop traced models
        traced = torch.jit.trace(nn.Linear(2, 2), one)
    assert names_of_inputs(traced, ((one,), {})) == ["argument 0"]
