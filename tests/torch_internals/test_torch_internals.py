"""Private names of other libraries: all are there, and one that is gone costs only what needs it."""

import importlib.metadata

import pytest
import torch

from vivace import torch_internals
from vivace.errors import Refused
from vivace.inspection import gather
from vivace.torch_internals import attribute, later, missing, named

LOST = "nothing can be tested"


@pytest.fixture(autouse=True)
def _names_of_a_test(monkeypatch):
    missing()  # so that every topic has noted its names
    monkeypatch.setattr(torch_internals, "TOUCHES", list(torch_internals.TOUCHES))


def test_everything_is_there():
    assert len(torch_internals.TOUCHES) > 50
    assert missing() == []


def gone(name):
    return f"torch {importlib.metadata.version('torch')} has no {name}, without which {LOST}"


def test_a_name_that_is_gone_says_so_where_it_is_used():
    function = named("torch._C._no_longer_there", lost=LOST)
    with pytest.raises(Refused, match="nothing can be tested"):
        function(1, key=2)
    assert missing() == [gone("torch._C._no_longer_there")]


def test_a_class_that_is_gone_can_be_derived_from_but_not_made():
    class Mode(named("torch.utils._gone.Mode", lost=LOST)):
        pass

    with pytest.raises(Refused, match="nothing can be tested"):
        Mode()
    assert not isinstance(torch.zeros(1), named("torch._Gone", lost=LOST))


def test_a_name_that_is_needed_later_is_looked_up_then():
    find = later("torch._gone.config", lost=LOST)
    with pytest.raises(Refused, match=r"has no torch\._gone\.config, without which nothing can be tested"):
        find()
    assert later("torch._C._len_torch_dispatch_stack", lost=LOST)()() == 0


def test_an_attribute_that_is_gone_says_so_where_it_is_read():
    with pytest.raises(Refused, match=r"has no torch\.Tensor\._colour"):
        attribute(torch.Tensor, "_colour", lost=LOST)(torch.zeros(1))
    assert missing() == [gone("torch.Tensor._colour")]


class Holder:
    announced: int

    def fill(self):
        self.set_by_a_method = 1


@pytest.mark.parametrize("name", ["announced", "set_by_a_method", "fill"])
def test_attributes_of_instances_are_found(name):
    assert attribute(Holder, name, lost=LOST) is not None
    assert missing() == []


def test_inspect_names_what_an_untried_torch_lacks(monkeypatch):
    named("torch._C._no_longer_there", lost=LOST)
    assert gone("torch._C._no_longer_there") not in gather.inspect().missing
    monkeypatch.setattr(gather, "NEWEST_TORCH", (2, 0))
    assert gone("torch._C._no_longer_there") in gather.inspect().missing
