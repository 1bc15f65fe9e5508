"""A model that is trained further with int8's rounding: what is rounded, and when."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from vivace.errors import Refused
from vivace.job import load
from vivace.serving import quantizing
from vivace.serving.quantizing import quantization_aware, rounded_inputs, rounded_weights
from vivace.serving.trained import load_trained

SEEDS = st.integers(0, 2**31 - 1)


@given(SEEDS, st.floats(1e-3, 1e3), st.sampled_from([torch.float32, torch.bfloat16]))
def test_inputs_lie_on_at_most_256_steps_of_which_one_is_zero(seed, size, dtype):
    stream = torch.Generator().manual_seed(seed)
    inputs = (size * torch.randn(2000, generator=stream)).to(dtype)
    found = rounded_inputs(inputs)
    assert found.dtype == dtype
    assert len(found.unique()) <= 256
    assert 0.0 in found
    step = float(inputs.max() - inputs.min()) / 255
    most = 0.51 if dtype == torch.float32 else 1.01
    assert float((found.float() - inputs.float()).abs().max()) <= most * step


@given(SEEDS, st.integers(1, 5))
def test_each_output_of_weights_has_its_own_steps_and_its_own_sign(seed, outputs):
    stream = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.arange(outputs).view(-1, 1, 1, 1)
    weights = torch.randn(outputs, 3, 7, 7, generator=stream) * sizes
    for one, before in zip(rounded_weights(weights), weights, strict=True):
        step = float(before.abs().max()) / 127
        assert float((one - before).abs().max()) <= 0.51 * step
        assert torch.allclose(one / step, (one / step).round(), atol=1e-3)


def test_nothing_but_zeros_stays_zeros():
    assert not rounded_inputs(torch.zeros(4)).any()
    assert not rounded_weights(torch.zeros(4, 4)).any()


def test_gradients_pass_as_if_nothing_were_rounded():
    inputs, weights = torch.randn(8, 5, requires_grad=True), torch.randn(3, 5, requires_grad=True)
    (rounded_inputs(inputs).sum() + rounded_weights(weights).sum()).backward()
    assert torch.equal(inputs.grad, torch.ones(8, 5))
    assert torch.equal(weights.grad, torch.ones(3, 5))


def test_it_rounds_in_training_alone_and_its_copies_round_by_themselves(trained):
    reference, run = trained("job")
    model = quantization_aware(reference, run=run).model()
    plain, _ = load_trained(load(reference), run)
    images = torch.randn(5, 1, 6, 6)
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert list(model.state_dict()) == list(plain.state_dict())
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[5].weight.zero_()
        assert torch.equal(copy.deepcopy(model).eval()(images), plain(images))
        assert not torch.equal(copy.deepcopy(model)(images), plain.train()(images))
        assert torch.equal(other(images), other[5].bias.expand(5, 3))
    assert model[5].weight.any()


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(4, 6, 3, stride=2, groups=2), (2, 4, 9)),
        (nn.Conv2d(4, 6, 3, padding="same", dilation=2), (2, 4, 9, 9)),
        (nn.Conv3d(4, 6, 3, padding=1, bias=False), (2, 4, 5, 5, 5)),
        (nn.Linear(4, 6), (2, 5, 4)),
    ],
)
def test_every_kind_of_layer_computes_what_it_would_on_rounded_numbers(layer, shape, monkeypatch, trained):
    monkeypatch.setattr(quantizing, "load_trained", lambda job, run: (copy.deepcopy(layer).eval(), None))
    reference, run = trained("job")
    model, inputs = quantization_aware(reference, run=run).model(), torch.randn(shape)
    expected = copy.deepcopy(layer)
    expected.weight.data = rounded_weights(layer.weight.data)
    assert torch.allclose(model(inputs), expected(rounded_inputs(inputs)), atol=1e-6)
    assert not torch.equal(model(inputs), layer(inputs))


@pytest.mark.parametrize("layer", [nn.LSTM(3, 4), nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular")])
def test_what_cannot_round_is_refused(trained, monkeypatch, layer):
    monkeypatch.setattr(quantizing, "load_trained", lambda job, run: (layer, None))
    reference, run = trained("job")
    with pytest.raises(Refused, match="no convolution or linear layer"):
        quantization_aware(reference, run=run).model()
