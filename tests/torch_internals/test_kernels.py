"""A CPU kernel of torch is exchanged, and torch's own can be called by what stands in its place."""

import warnings

import pytest
import torch

from vivace import torch_internals
from vivace.errors import Refused
from vivace.torch_internals import kernels, later


def shifted(own):
    """The operator, and one more."""

    def kernel(*arguments, **keywords):
        return own(*arguments, **keywords) + 1

    return kernel


def fill():
    return torch.full((2,), 3.0).digamma()


EXPECTED = fill()


@pytest.fixture(autouse=True)
def back():
    """Torch's kernels are its own again for other tests."""
    held = len(kernels._exchanged)
    yield
    for library in reversed(kernels._exchanged[held:]):
        library._destroy()
    del kernels._exchanged[held:]
    assert torch.equal(fill(), EXPECTED)


def test_the_kernel_in_its_place_is_called_and_can_call_torchs():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernels.exchange("digamma", shifted)
    assert torch.equal(fill(), EXPECTED + 1)


def test_arguments_go_on_by_place_and_by_name():
    given = []

    def noted(own):
        def kernel(*arguments, **keywords):
            given.append((len(arguments), sorted(keywords)))
            return own(*arguments, **keywords)

        return kernel

    source = torch.Generator().manual_seed(3)
    expected = torch.empty(50).uniform_(2.0, 5.0, generator=source)
    kernels.exchange("uniform_", noted)
    found = torch.empty(50).uniform_(2.0, 5.0, generator=source.manual_seed(3))
    assert torch.equal(found, expected)
    assert given == [(3, ["generator"])]


def test_gradients_and_the_count_of_changes_are_torchs():
    x = torch.full((2,), 3.0, requires_grad=True)
    (expected,) = torch.autograd.grad(x.digamma().sum(), x)
    kernels.exchange("digamma", shifted)
    (found,) = torch.autograd.grad(x.digamma().sum(), x)
    assert torch.equal(found, expected)

    def doubled(own):
        def kernel(mask, value, **keywords):
            return own(mask, 2 * value, **keywords)

        return kernel

    y = torch.zeros(3)
    kernels.exchange("fill_.Scalar", doubled)
    assert y.fill_(2.0) is y
    assert (y.tolist(), y._version) == ([4.0] * 3, 1)


def test_other_devices_are_left_alone():
    kernels.exchange("digamma", shifted)
    assert torch.empty(2, device="meta").digamma().is_meta


@pytest.mark.parametrize("name", ["_keys", "_key"])
def test_without_a_private_name_nothing_is_exchanged(name, monkeypatch):
    monkeypatch.setattr(torch_internals, "TOUCHES", list(torch_internals.TOUCHES))
    monkeypatch.setattr(kernels, name, later("torch._C._no_longer_there", lost=kernels._LOST))
    with pytest.raises(Refused, match=r"_there, without which no kernel of PyTorch's own can be exchanged"):
        kernels.exchange("digamma", shifted)
    assert torch.equal(fill(), EXPECTED)
