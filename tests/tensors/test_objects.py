"""Batches that are objects: graphs, what moves itself, and what a DataLoader knows by its `pin_memory`."""

import threading
import weakref

import pytest
import torch
from torch import nn

from vivace.errors import Refused
from vivace.session.session import place
from vivace.tensors.trees import batch_size, digest, is_object, joined, map_tensors, outline, split, tensors
from vivace.torch_internals.tensors import FakeTensorMode

CPU, META = torch.device("cpu"), torch.device("meta")


class Store(dict):
    """Where a graph keeps what it has, as PyTorch Geometric's do: with a reference to whose it is."""

    def __init__(self, parent):
        super().__init__()
        self.parent = weakref.ref(parent)

    def __reduce__(self):
        return dict, (dict(self),)


class Graphs:
    """Several graphs as one; moves itself, and returns itself."""

    def __init__(self, nodes, edges, number=2):
        self.store = Store(self)
        self.store.update(nodes=nodes, edges=edges, again=nodes)
        self.batch_size = number

    def __copy__(self):
        return type(self)(self.store["nodes"], self.store["edges"], self.batch_size)

    def to(self, device):
        self.store.update({key: value.to(device) for key, value in self.store.items()})
        return self


class Silent(Graphs):
    """Moves itself, returns nothing, and does not say how many it holds."""

    batch_size = property(lambda self: None, lambda self, value: None)

    def to(self, device):
        super().to(device)


class Documented:
    """As torch's documentation lets one write a batch of one's own."""

    def __init__(self, x, source="a file"):
        self.x, self.source = x, source

    def pin_memory(self):
        self.x = self.x.pin_memory()
        return self


class Length:
    """A number with a unit, which it changes by `to`."""

    def to(self, unit):
        raise ValueError(f"{unit} is no unit of length")


def graphs(kind=Graphs):
    return kind(torch.ones(5, 3), torch.zeros(2, 7, dtype=torch.int64))


def test_the_tensors_of_an_object_are_found_once_and_replaced_in_a_copy():
    batch = graphs(), {"y": torch.ones(2)}
    assert [tuple(one.shape) for one in tensors(batch)] == [(5, 3), (2, 7), (2,)]
    found = map_tensors(batch, lambda tensor: tensor + 1)
    assert type(found[0]) is Graphs
    assert found[0].store["nodes"].unique().tolist() == [2.0]
    assert found[0].store["again"] is found[0].store["nodes"], "what is one tensor stays one"
    assert batch[0].store["nodes"].unique().tolist() == [1.0]
    assert digest(batch) != digest(found)


@pytest.mark.parametrize("kind", [Graphs, Silent])
def test_an_object_is_moved_by_its_own_way_and_the_persons_stays(kind):
    batch = graphs(kind)
    assert place([batch], device=CPU)[0] is batch, "it is there"
    there = place([batch], device=META)[0]
    assert type(there) is kind
    assert {value.device for value in there.store.values()} == {META}
    assert {value.device for value in batch.store.values()} == {CPU}


def test_what_a_loader_pins_is_moved_tensor_by_tensor():
    batch = Documented(torch.ones(4, 2))
    there = place(batch, device=META)
    assert (there.x.device, there.source, batch.x.device) == (META, "a file", CPU)
    assert batch_size(batch) == 4


def test_samples_are_what_the_object_says_or_rows_of_its_first_tensor():
    assert batch_size((graphs(), torch.zeros(9))) == 2
    assert batch_size(graphs(Silent)) == 5

    class Shaped(Documented):
        batch_size = torch.Size([6, 2])

    assert batch_size(Shaped(torch.ones(6, 2))) == 6


def test_objects_are_neither_cut_nor_joined():
    batch = graphs(), torch.zeros(2)
    with pytest.raises(Refused, match="a Graphs cannot be cut into pieces"):
        split(batch, 1)
    assert joined([batch, batch]) is None


def test_an_outline_tells_shapes_and_what_stands_beside_tensors():
    one, other = Documented(torch.zeros(2)), Documented(torch.ones(2))
    assert outline(one) == outline(other)
    assert outline(one) != outline(Documented(torch.zeros(3)))
    assert outline(one) != outline(Documented(torch.zeros(2), "another file"))
    closed = Documented(torch.zeros(2), threading.Lock())
    assert outline(closed) != outline(closed), "a recorded step must not run on tensors that nobody copies"


def test_an_object_that_cannot_be_pickled_is_as_it_is_and_moved_all_the_same():
    batch = graphs()
    batch.lock = threading.Lock()
    assert list(tensors(batch)) == []
    assert map_tensors(batch, torch.clone) is batch
    there = place(batch, device=META)
    assert {value.device for value in there.store.values()} == {META}
    assert {value.device for value in batch.store.values()} == {CPU}


def test_an_object_without_tensors_is_not_asked_to_move():
    lengths = [Length()]
    assert place(lengths, device=META)[0] is lengths[0]


def test_modules_and_what_is_looked_through_are_no_objects():
    class Named(dict):
        def to(self, device):
            raise AssertionError("its entries are moved")

    assert not any(
        map(is_object, (nn.Linear(1, 1), torch.ones(1), Named(), torch.device("cpu"), "text", Graphs))
    )
    assert place(Named(x=torch.ones(1)), device=META)["x"].device == META


def test_fake_tensors_stand_in_for_those_of_an_object():
    with FakeTensorMode() as mode:
        found = map_tensors(graphs(), mode.from_tensor)
        assert isinstance(found.store["nodes"], type(mode.from_tensor(torch.ones(1))))
