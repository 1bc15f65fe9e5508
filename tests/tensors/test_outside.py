"""What a training keeps in Python, outside of its weights: looked at, and put back."""

import builtins
import importlib
import random
import runpy
import sys
from collections import OrderedDict, deque
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn

from vivace.tensors.outside import MOST_LOOKED_AT, Outside, alike, assign, attributes, changed
from vivace.torch_internals.tensors import dense_parts


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


@pytest.mark.parametrize(
    ("rng", "draw"),
    [
        (torch.Generator(), lambda rng: torch.rand(1, generator=rng)),
        (random.Random(0), lambda rng: rng.random()),
        (numpy.random.default_rng(0), lambda rng: rng.normal()),
        (numpy.random.RandomState(0), lambda rng: rng.normal()),
    ],
)
def test_that_a_generator_of_any_library_moved_is_seen(rng, draw, model):
    before = Outside([rng], [model])
    assert not before.drew()
    draw(rng)
    assert before.drew()
    before.put_back()
    assert not before.drew()


def test_values_that_were_there_come_back(model):
    counts, slotted, seen = {"calls": 0}, Slotted(), [torch.zeros(2)]
    named = SimpleNamespace(calls=0)

    def loss():
        counts["calls"] += 1
        counts["more"] = 1
        slotted.calls += 1
        named.calls += 1
        seen[0].add_(1)
        seen.append(torch.ones(1))

    outside = Outside((loss,), [model])
    loss()
    assert outside.moved()
    outside.put_back()
    assert (counts, slotted.calls, named.calls) == ({"calls": 0}, 0, 0)
    assert [one.tolist() for one in seen] == [[0.0, 0.0]]


@pytest.mark.parametrize("kind", ["array", "slot", "teacher"])
def test_that_only_an_array_a_slot_or_another_modules_weights_move_is_seen(model, kind):
    array, slotted, teacher = numpy.zeros(2), Slotted(), nn.Linear(2, 1).requires_grad_(False)

    def loss():
        return {"array": array, "slot": slotted, "teacher": teacher}

    outside, weights = Outside((loss,), [model]), teacher.weight.clone()
    assert not outside.moved()
    if kind == "array":
        array += 1
    elif kind == "slot":
        slotted.calls += 1
    else:
        teacher.weight.data.add_(1)
    assert outside.moved()
    outside.put_back()
    assert not outside.moved()
    assert (array.tolist(), slotted.calls) == ([0.0, 0.0], 0)
    assert torch.equal(teacher.weight, weights)


class Steps:
    def __init__(self):
        self.num, self.of = 0, {"mean": torch.zeros(2)}


def test_what_modules_keep_in_containers_and_objects_is_carried_over():
    def made():
        first, second = nn.Linear(2, 2), nn.Linear(2, 2)
        first.kept = second.kept = {"count": 0, "state": (torch.zeros(2), [1])}
        first.steps, first.weights, first.parts = Steps(), [first.weight], [second]
        return nn.Sequential(first, second)

    mine, other = made(), made()
    before = attributes([mine])
    mine[0].kept["count"] += 1
    mine[0].kept["state"][0].add_(1)
    mine[0].steps.num += 1
    mine[0].steps.of["mean"] += 1
    now = attributes([mine])
    moving = set(changed(now, before))
    assert moving == {(0, "0", "kept"), (0, "1", "kept"), (0, "0", "steps.num"), (0, "0", "steps.of")}
    assign([other], {key: now[key] for key in moving})
    assert not set(changed(attributes([other]), now))
    assert other[0].kept is other[1].kept
    assert other[0].kept["state"][0] is not mine[0].kept["state"][0]
    assert (other[0].parts, other[0].weights[0]) == ([other[1]], other[0].weight)


def test_what_shares_memory_with_the_model_is_the_models_own(model):
    """To put it back would be to take back what the model has learned."""
    tied, copied = nn.Linear(2, 1), nn.Linear(2, 1)
    tied.weight, copied.weight.data = model.weight, model.weight.data
    model.register_buffer("mean", torch.zeros(4))
    model.views, views = [model.mean[:2]], [model.mean[2:]]
    for held in (tied, copied, views):
        outside = Outside((lambda held=held: held,), [model])
        with torch.no_grad():
            model.weight.add_(1)
            model.mean.add_(1)
        weight, mean = model.weight.clone(), model.mean.clone()
        assert outside.shares
        assert (0, "", "views") not in attributes([model])
        outside.put_back()
        assert torch.equal(model.weight, weight)
        assert torch.equal(model.mean, mean)
    assert not Outside((lambda: nn.Linear(2, 1),), [model]).shares


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_tensor_is_as_large_as_what_it_stores(model, layout):
    places = torch.arange(20_000)
    links = torch.sparse_coo_tensor(torch.stack([places, places]), torch.ones(20_000), check_invariants=True)
    links = links.to_sparse(layout=layout)
    outside = Outside((lambda: links,), [model])
    assert not outside.large
    assert not outside.moved()
    dense_parts(links)[-1].mul_(2)
    assert outside.moved()
    outside.put_back()
    assert not outside.moved()
    model.links = links
    assert not set(changed(attributes([model]), attributes([model])))


def test_copies_are_kept_where_they_are_wanted(model):
    seen = [torch.zeros(2)]
    outside = Outside((lambda: seen,), [model], store="meta")
    assert [then.device.type for _, then in outside._tensors] == ["meta"]


def test_another_modules_parts_are_counted(model):
    other = nn.Sequential(*(nn.Linear(1, 1) for _ in range(MOST_LOOKED_AT + 10)))
    assert len(Outside((lambda: other,), [model])._tensors) < 2 * MOST_LOOKED_AT


class Meta(type):
    """As a registry of a person's is."""


class Norm(nn.Module, metaclass=Meta):
    eps = 1e-5
    known = ()


def test_a_class_that_a_module_keeps_is_no_object():
    model, other = nn.Module(), nn.Module()
    model.norm_class = other.norm_class = Norm
    found = attributes([model])
    assert not found
    assign([other], found)


def test_containers_in_themselves_are_left_alone():
    root, empty = {"name": "root", "children": []}, []
    root["children"].append({"name": "leaf", "parent": root, "children": []})
    for _ in range(60):
        empty = [empty, empty]  # which is 2**60 lists, and no number
    deep = []
    for _ in range(5000):
        deep = [deep]
    model = nn.Module()
    model.tree, model.empty, model.deep, model.count = root, empty, deep, 0
    assert list(attributes([model])) == [(0, "", "count")]
    other = {"name": "root", "children": []}
    other["children"].append({"name": "leaf", "parent": other, "children": []})
    assert alike(root, other)
    other["children"][0]["name"] = "other"
    assert not alike(root, other)


def test_a_container_that_nobody_changed_is_not_touched(model):
    """As other threads may go through it."""
    kept, changed_one = deque([1, 2]), deque([1, 2])
    outside = Outside((lambda: (kept, changed_one),), [model])
    changed_one[0] = 3
    going = iter(kept)
    outside.put_back()
    assert list(going) == [1, 2]  # which raises where it was emptied and filled meanwhile
    assert list(changed_one) == [1, 2]


@pytest.mark.parametrize("kind", [dict, lambda names: SimpleNamespace(**names)])
def test_the_names_of_a_script_are_put_back_and_pythons_own_stay(kind, tmp_path, model):
    (tmp_path / "script.py").write_text("counts = []\n")
    names = runpy.run_path(str(tmp_path / "script.py"))
    held = kind(names)
    outside = Outside((lambda: held,), [model])
    names["counts"].append(1)
    outside.put_back()
    assert names["counts"] == []
    assert not any(container is vars(builtins) for container, _ in outside._containers)
    assert sorted([2, 1]) == [1, 2]


class Registry(OrderedDict):
    """Makes what is asked for, as the table of activations of transformers does."""

    def __getitem__(self, name):
        return super().__getitem__(name)()


def test_a_registry_that_makes_what_is_asked_for_is_put_back_as_it_was(model):
    registry = Registry(relu=nn.ReLU)
    outside = Outside((lambda: registry,), [model])
    assert not outside.moved()
    registry["gelu"] = nn.GELU
    outside.put_back()
    assert list(OrderedDict.items(registry)) == [("relu", nn.ReLU)]
    assert isinstance(registry["relu"], nn.ReLU)


def test_a_librarys_table_keeps_its_entries(model):
    from transformers.activations import ACT2FN

    names = list(ACT2FN)
    outside = Outside((lambda: ACT2FN,), [model])
    outside.put_back()
    assert list(ACT2FN) == names
    assert isinstance(ACT2FN["gelu"], nn.Module)


def test_what_is_imported_meanwhile_stays(model, tmp_path, monkeypatch):
    (tmp_path / "imported_meanwhile.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    everything = sys.modules
    outside = Outside((lambda: everything,), [model])
    importlib.import_module("imported_meanwhile")
    outside.put_back()
    assert sys.modules.pop("imported_meanwhile")


@dataclass(slots=True, weakref_slot=True)
class Kept:
    count: int = 0


def test_what_cannot_be_written_leaves_the_rest_put_back(model):
    kept, counts, locked = Kept(), [0], torch.zeros(1).expand(3)
    outside = Outside((lambda: (kept, locked, counts),), [model])
    kept.count, counts[0] = 1, 1
    locked.data = torch.ones(1).expand(3)
    with pytest.raises(RuntimeError, match="memory location"):
        outside.put_back()
    assert (kept.count, counts) == (0, [0])


def test_numbers_that_are_none_are_the_same_and_are_not_written(model):
    missing = torch.full((1,), float("nan")).expand(3)
    outside = Outside((lambda: missing,), [model])
    assert not outside.moved()
    outside.put_back()


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning")
@pytest.mark.parametrize(
    "odd",
    [
        lambda: torch.quantize_per_tensor(torch.rand(600, 600), 0.1, 0, torch.qint8),
        lambda: torch.empty(600, 600, device="meta"),
        lambda: torch.nested.nested_tensor([torch.rand(600, 600)], layout=torch.jagged),
    ],
)
def test_tensors_without_plain_numbers_are_left_alone(odd, model):
    tensor = odd()
    model.kept = [tensor]
    outside = Outside((lambda: tensor,), [model])
    assert not outside.large
    assert not outside.moved()
    outside.put_back()
    assert (0, "", "kept") not in attributes([model])
