"""What two looks at a data set tell, and what makes batches the same."""

import io
import threading
from collections import UserDict, namedtuple

import numpy
import pytest
import torch

from vivace.live.fetching import Traces, difference, num_bytes


class Holder:
    shared = 0

    def __init__(self, **things):
        vars(self).update(things)


def closed_over(thing):
    return lambda rows: (rows, thing)


@pytest.mark.parametrize(
    ("make", "change", "reason"),
    [
        (lambda: Holder(seen=[]), lambda h: h.seen.append(1), "the length of Holder.seen"),
        (lambda: Holder(cache={}), lambda h: h.cache.update(a=1), "Holder.cache"),
        (lambda: Holder(inner=Holder(n=1)), lambda h: setattr(h.inner, "n", 2), "Holder.inner.n"),
        (lambda: Holder(g=torch.Generator()), lambda h: torch.rand(1, generator=h.g), "Holder.g"),
        (lambda: Holder(g=numpy.random.default_rng(0)), lambda h: h.g.random(), "Holder.g"),
        (lambda: Holder(n=torch.zeros(1)), lambda h: h.n.add_(1), "Holder.n"),
        (lambda: closed_over({"a": 1}), lambda f: f.__closure__[0].cell_contents.update(a=2), "thing.a"),
        (Holder, lambda h: setattr(Holder, "shared", Holder.shared + 1), "Holder.shared"),
        (Holder, lambda h: torch.rand(1), "torch's stream"),
        (lambda: Holder(file=io.BytesIO()), lambda h: None, "an open file or connection (Holder.file)"),
        (lambda: Holder(thread=threading.Thread()), lambda h: None, "threads or processes (Holder.thread)"),
    ],
)
def test_what_a_fetch_leaves_behind_is_named(make, change, reason):
    data = make()
    before = Traces(data)
    assert Traces(Holder(n=1)).changed(Traces(Holder(n=1))) == ""
    change(data)
    assert reason in before.changed(Traces(data))


def test_large_data_are_looked_at_quickly():
    data = Holder(names=[f"{n}.png" for n in range(100_000)], pixels=numpy.zeros((10, 1000)))
    data.itself = data
    looked = Traces(data)
    assert len(looked.memory) < 100
    assert looked.changed(Traces(data)) == ""


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("mine", "theirs", "same"),
    [
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.ones(2, 3), torch.ones(3, 2).t(), False),
        (torch.ones(2), torch.ones(2).double(), False),
        (Point(1, "a"), Point(1, "a"), True),
        (Point(1, "a"), (1, "a"), False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, False),
        (UserDict(a=torch.ones(1)), UserDict(a=torch.ones(1)), True),
        (UserDict(a=torch.ones(1)), UserDict(a=torch.zeros(1)), False),
        (numpy.arange(3), numpy.arange(3), True),
        (numpy.arange(3), numpy.arange(3.0), False),
        (object(), object(), False),
        ([1, 2], [1, 2, 3], False),
        (float("nan"), float("nan"), True),
    ],
)
def test_batches_are_the_same_bit_for_bit_or_not(mine, theirs, same):
    assert (difference(mine, theirs) == "") is same


def test_the_size_of_a_batch():
    batch = {"a": torch.ones(4), "b": [numpy.ones(2), "abc", Holder(c=torch.ones(1))]}
    assert 16 + 16 + 3 + 4 <= num_bytes(batch) < 1000
