"""Trees of tensors, modules that models share, and optimizers that get more to do."""

import dataclasses
from collections import UserDict, defaultdict

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence

from vivace.errors import Refused
from vivace.tensors.modules import patched
from vivace.tensors.optimizers import switch_optimizer
from vivace.tensors.trees import Again, batch_size, digest, joined, map_tensors, outline, split, tensors


def test_a_dictionary_of_another_kind_stays_one():
    batch = defaultdict(list, x=torch.ones(2), y=[torch.zeros(1)])
    found = map_tensors(batch, lambda tensor: tensor + 1)
    assert found.default_factory is list
    assert [float(one[0]) for one in tensors(found)] == [2.0, 1.0]
    assert float(batch["x"][0]) == 1.0


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_a_dictionary_of_a_persons_own_keeps_what_else_it_holds(kind):
    class Own(kind):
        def __init__(self, x, source):
            super().__init__(x=x)
            self.source = source

    batch = Own(torch.ones(2), "a file")
    found = map_tensors(batch, lambda tensor: tensor + 1)
    assert (type(found), found.source) == (Own, "a file")
    assert (float(found["x"][0]), float(batch["x"][0])) == (2.0, 1.0)


def test_numbers_that_are_conjugated_when_they_are_read_have_a_digest():
    spectrum = torch.fft.rfft(torch.randn(2, 8)).conj()
    for lazy, plain in ((spectrum, spectrum.resolve_conj()), (spectrum.imag, spectrum.imag.resolve_neg())):
        assert digest([lazy]) == digest([plain.clone()])


def test_a_packed_sequence_keeps_its_lengths_as_they_are():
    packed = pack_padded_sequence(torch.randn(3, 2, 4), torch.tensor([2, 3]), enforce_sorted=False)
    found = map_tensors(packed, torch.Tensor.double)
    assert found.data.dtype == torch.float64
    assert torch.equal(found.batch_sizes, packed.batch_sizes)
    assert torch.equal(found.sorted_indices, packed.sorted_indices)
    nn.LSTM(4, 2).double()(found)


def test_an_outline_tells_the_lengths_of_packed_sequences():
    """As many numbers of other sequences are another batch: a recorded step reads its lengths from Python."""

    def packed(*lengths):
        return [pack_sequence([torch.zeros(n, 2) for n in lengths], enforce_sorted=False), torch.ones(3)]

    assert outline(packed(5, 3, 3)) == outline(packed(3, 5, 3))
    assert outline(packed(5, 3, 3)) != outline(packed(5, 4, 2))
    assert outline({"a": torch.zeros(2)}) != outline({"a": torch.zeros(2, dtype=torch.int64)})


def test_packed_sequences_are_counted_and_neither_cut_nor_joined():
    """Their rows are steps in time; joined by rows, every second batch would be left out."""
    batch = pack_padded_sequence(torch.randn(3, 2, 4), torch.tensor([3, 2])), torch.zeros(2)
    assert batch_size(batch) == 2
    assert joined([batch, batch]) is None
    with pytest.raises(Refused, match="a packed sequence cannot be cut into pieces"):
        split(batch, 1)


def test_a_sparse_tensor_is_not_cut():
    with pytest.raises(Refused, match="a sparse tensor cannot be cut into pieces"):
        split((torch.eye(4).to_sparse(), torch.zeros(4)), 2)


def test_a_module_that_two_models_share_is_its_own_again():
    layer = nn.Linear(1, 1)
    with patched([layer, layer], "forward", [abs, abs]):
        assert layer.forward is abs
    assert "forward" not in vars(layer)


def test_a_group_that_is_added_later_is_saved_as_it_is():
    one, other = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    undo = switch_optimizer(optimizer, {"fused": True, "foreach": False})
    optimizer.add_param_group({"params": list(other.parameters()), "lr": 0.2})
    groups = optimizer.state_dict()["param_groups"]
    assert [group["lr"] for group in groups] == [0.1, 0.2]
    assert groups[0]["fused"] is None
    undo()
    assert optimizer.param_groups[0]["fused"] is None


@dataclasses.dataclass
class Scaled:
    """Divides once, as it is made; `total` comes of the others."""

    x: torch.Tensor
    total: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self):
        self.x = self.x / 4
        self.total = self.x.sum()


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    name: str = "a"


def test_a_dataclass_is_copied_and_not_made_again():
    batch = Scaled(torch.ones(2))
    found = map_tensors(batch, lambda tensor: tensor + 1)
    assert (found.x.tolist(), float(found.total)) == ([1.25, 1.25], 1.5)
    assert batch.x.tolist() == [0.25, 0.25]
    frozen = map_tensors(Frozen(torch.zeros(1), "b"), lambda tensor: tensor + 1)
    assert (frozen.x.tolist(), frozen.name) == ([1.0], "b")


def test_what_is_no_tensor_goes_with_its_samples():
    names = ["a", "b", "c", "d"]
    batch = {
        "x": torch.arange(4),
        "names": names,
        "row": numpy.arange(4),
        "weights": torch.ones(3),
        "of": "s",
    }
    first, second = split(batch, 2)
    assert (first["names"], second["names"]) == (["a", "b"], ["c", "d"])
    assert (second["row"].tolist(), len(second["weights"]), second["of"]) == ([2, 3], 3, "s")
    again = joined([first, second])
    assert (again["x"].tolist(), again["names"], again["row"].tolist()) == ([0, 1, 2, 3], names, [0, 1, 2, 3])
    assert len(again["weights"]) == 3


def test_the_boxes_of_pictures_go_with_them():
    boxes = [{"boxes": torch.full((number, 4), float(number))} for number in (1, 2, 4, 5)]
    stacked = torch.arange(4.0).view(4, 1, 1, 1), boxes
    for pictures, targets in (stacked, ([torch.zeros(3, 2 + n, 2) for n in range(4)], boxes)):
        assert batch_size((pictures, targets)) == 4
        pieces = split((pictures, targets), 2)
        assert [len(one) for one in pieces[1]] == [2, 2]
        assert [float(one["boxes"][0, 0]) for one in pieces[1][1]] == [4.0, 5.0]
        together = joined(pieces)
        assert [len(one) for one in together] == [4, 4]
        assert [float(one["boxes"][0, 0]) for one in together[1]] == [1.0, 2.0, 4.0, 5.0]


def test_lists_of_whole_batches_are_none_of_samples():
    inputs = [torch.zeros(8, 3), torch.zeros(8, 5)], torch.zeros(8)
    assert batch_size(inputs) == 8
    assert [len(one) for one in split(inputs, 4)[0][0]] == [4, 4]
    labelled, others = (torch.zeros(4, 3), torch.zeros(4)), (torch.zeros(12, 3), torch.zeros(12))
    assert batch_size((labelled, others)) == 4
    assert len(split((labelled, others), 2)[0]) == 2
    assert batch_size((["one", "two", "three"], [0, 1, 1])) == 3
    assert batch_size({"x": numpy.zeros((5, 2))}) == 5


def test_a_batch_without_samples_is_one_piece():
    batch = (torch.empty(0, 3), torch.empty(0, dtype=torch.int64))
    assert split(batch, 0) == [batch]


def test_a_batch_that_is_given_again_is_never_written_into():
    batch = torch.ones(2, requires_grad=True), torch.tensor([1, 2])
    again = Again(batch)
    given = again()
    assert again()[1] is given[1]
    assert given[0].requires_grad
    given[1].sub_(1)
    assert [one()[1].tolist() for one in (again, Again(batch))] == [[1, 2], [1, 2]]


@pytest.mark.parametrize("inside", [False, True])
def test_a_batch_of_inference_mode_is_given_as_it_was(inside):
    with torch.inference_mode():
        batch = torch.tensor([1, 2])
    with torch.inference_mode(inside):
        again = Again(batch)
        again().sub_(1)
        assert again().tolist() == [1, 2]


def test_a_batch_is_given_again_where_it_lay():
    again = Again(torch.ones(2, device="meta"))
    again().sub_(1)
    assert again().device.type == "meta"


class Pair(list):
    """A list that takes its parts one by one, and holds more than them."""

    def __init__(self, first, second):
        super().__init__([first, second])
        self.name = "pair"


class Couple(tuple):
    def __new__(cls, first, second):
        return super().__new__(cls, (first, second))


def test_lists_and_tuples_of_any_class_are_copied_as_what_they_are():
    for batch in (Pair(torch.ones(2), 1), Couple(torch.ones(2), 1)):
        batch.label = "mine"
        found = map_tensors(batch, lambda tensor: tensor + 1)
        assert (type(found), found[1], found.label) == (type(batch), 1, "mine")
        assert torch.equal(found[0], torch.full((2,), 2.0))
    assert found is not batch
    sizes = {"size": torch.ones(2, 3).shape, "most": torch.ones(2, 3).max(1)}
    found = map_tensors(sizes, lambda tensor: tensor + 1)
    assert found["size"] == torch.Size([2, 3])
    assert type(found["size"]) is torch.Size
    assert found["most"].values.tolist() == [2.0, 2.0]
