"""A CPU kernel of torch is exchanged for as long as wanted, and torch's own is called and comes back."""

import contextlib

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


def is_torchs():
    return torch.equal(fill(), EXPECTED)


@pytest.fixture
def held(monkeypatch):
    """What registers kernels with torch, kept alive: torch's kernels come back without a collection, too."""
    made = []

    class Held(torch.library.Library):
        def __init__(self, *given):
            super().__init__(*given)
            made.append(self)

    monkeypatch.setattr(torch.library, "Library", Held)
    return made


def test_the_kernel_in_its_place_is_called_and_can_call_torchs(held):
    with kernels.exchanged("digamma", shifted):
        assert torch.equal(fill(), EXPECTED + 1)
    assert is_torchs()
    with kernels.exchanged("digamma", shifted):  # a second time, too
        assert torch.equal(fill(), EXPECTED + 1)
    assert is_torchs()
    assert len(held) == 2


def test_arguments_go_on_by_place_and_by_name():
    given = []

    def noted(own):
        def kernel(*arguments, **keywords):
            given.append((len(arguments), sorted(keywords)))
            return own(*arguments, **keywords)

        return kernel

    source = torch.Generator().manual_seed(3)
    expected = torch.empty(50).uniform_(2.0, 5.0, generator=source)
    with kernels.exchanged("uniform_", noted):
        found = torch.empty(50).uniform_(2.0, 5.0, generator=source.manual_seed(3))
    assert torch.equal(found, expected)
    assert given == [(3, ["generator"])]


def test_gradients_and_the_count_of_changes_are_torchs():
    x = torch.full((2,), 3.0, requires_grad=True)
    (expected,) = torch.autograd.grad(x.digamma().sum(), x)
    with kernels.exchanged("digamma", shifted):
        (found,) = torch.autograd.grad(x.digamma().sum(), x)
    assert torch.equal(found, expected)

    def doubled(own):
        def kernel(mask, value, **keywords):
            return own(mask, 2 * value, **keywords)

        return kernel

    y = torch.zeros(3)
    with kernels.exchanged("fill_.Scalar", doubled):
        assert y.fill_(2.0) is y
    assert (y.tolist(), y._version) == ([4.0] * 3, 1)


def test_other_devices_are_left_alone():
    with kernels.exchanged("digamma", shifted):
        assert torch.empty(2, device="meta").digamma().is_meta


def test_torchs_kernel_is_back_after_an_error(held):
    with pytest.raises(KeyError), kernels.exchanged("digamma", shifted):
        raise KeyError
    assert is_torchs()

    def broken(own):
        raise KeyError

    with pytest.raises(KeyError), kernels.exchanged("digamma", broken):
        pass
    with pytest.raises(TypeError), kernels.exchanged("digamma", lambda own: None):
        pass
    assert is_torchs()
    with kernels.exchanged("digamma", shifted):
        assert not is_torchs()


@pytest.mark.parametrize("name", ["_destroy", "_keys", "_key"])
def test_without_a_private_name_nothing_is_exchanged(name, monkeypatch):
    monkeypatch.setattr(torch_internals, "TOUCHES", list(torch_internals.TOUCHES))
    monkeypatch.setattr(kernels, name, later("torch._C._no_longer_there", lost=kernels._LOST))
    with contextlib.ExitStack() as stack:
        with pytest.raises(
            Refused, match=r"_there, without which no kernel of PyTorch's own can be exchanged"
        ):
            stack.enter_context(kernels.exchanged("digamma", shifted))
        assert is_torchs()
