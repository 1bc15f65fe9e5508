import copy
import functools
import pickle

import pytest
import torch
from torch import nn

from vivace.errors import Refused
from vivace.ledger import Observation
from vivace.plan import Plan
from vivace.session.opening import attach
from vivace.technique import registry
from vivace.testing import TechniqueContract

PaddedStem = registry.find("padded_stem")


@pytest.mark.usefixtures("one_thread")
class TestPaddedStem(TechniqueContract):
    technique = PaddedStem


def opened(model, **settings):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return attach(
        Plan([PaddedStem(**settings)]),
        model=model,
        optimizer=optimizer,
        loss=lambda m, b: m(b).square().mean(),
    )


@pytest.mark.parametrize("channels", [4, 8])
@pytest.mark.parametrize("mode", ["zeros", "reflect"])
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_values_and_gradients_are_the_convolutions_own(channels, mode, order):
    numbers = torch.Generator().manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1, padding_mode=mode, stride=2), nn.Conv2d(5, 9, 1)
    ).double()
    plain = copy.deepcopy(model)
    x = torch.randn(2, 3, 7, 6, generator=numbers, dtype=torch.float64).contiguous(memory_format=order)
    with opened(model, channels=channels) as session:
        assert session.build.notes["padded_convolutions"] == [1 if channels == 4 else 2, 0]
        seen, wanted = model(x), plain(x)
        torch.testing.assert_close(seen, wanted)
        seen.square().sum().backward()
        wanted.square().sum().backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
        assert [p.shape for p in model.parameters()] == [p.shape for p in plain.parameters()]
    assert not any("forward" in vars(m) for m in model.modules())


def test_autocast_rounds_as_the_convolution_would():
    model = nn.Conv2d(3, 8, 3)
    plain, x = copy.deepcopy(model), torch.randn(2, 3, 8, 8)
    with opened(model), torch.autocast("cpu", torch.bfloat16):
        seen, wanted = model(x), plain(x)
        assert seen.dtype == torch.bfloat16
        torch.testing.assert_close(seen, wanted, rtol=0.02, atol=0.02)


def test_it_confirms_by_the_convolutions_that_ran_in_training():
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    with opened(model) as session:
        model[0].eval()  # such as the frozen beginning of a network
        model(torch.randn(1, 3, 5, 5))
        seen = Observation({}, {}, 0, 0.0, notes=session.build.notes)
        with pytest.raises(Refused, match="no such convolution ran in training"):
            PaddedStem().confirm(seen, seen)
        model[0].train()
        model(torch.randn(1, 3, 5, 5))
        assert PaddedStem().confirm(seen, seen) == "1 convolution padded to 8 channels"


def test_evaluation_and_copies_use_their_own_weights():
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    with opened(model):
        other = copy.deepcopy(model)
        nn.init.zeros_(other[0].weight)
        nn.init.zeros_(other[0].bias)
        assert not other(torch.randn(1, 3, 5, 5)).any()


def test_models_without_narrow_convolutions_are_refused():
    for layer in (nn.Linear(3, 4), nn.Conv2d(8, 8, 3), nn.Conv2d(4, 4, 3, groups=4)):
        with pytest.raises(Refused, match="padded_stem: no 2-D convolution has fewer than 8 input channels"):
            opened(nn.Sequential(layer))


def test_a_model_that_was_stored_while_a_plan_acted_on_it_is_padded_again():
    with opened(nn.Sequential(nn.Conv2d(3, 4, 3))) as session:
        copied = pickle.loads(pickle.dumps(session.build.model))
    assert isinstance(vars(copied[0])["forward"], functools.partial)
    with opened(copied) as session:
        assert session.build.notes["padded_convolutions"] == [1, 0]


def test_a_convolution_whose_forward_a_person_has_replaced_keeps_that():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3))
    model[0].forward = lambda x: nn.functional.conv2d(x, model[0].weight.sign())
    plain, x = model(torch.ones(1, 3, 5, 5)), torch.ones(1, 3, 5, 5)
    with opened(model) as session:
        assert session.build.notes["padded_convolutions"] == [1, 0]
        torch.testing.assert_close(model(x), plain)
