"""For any sizes, samplers, ranks and stops: what comes before and after is what an uninterrupted run sees."""

import random

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

from vivace.data.damage import Damage
from vivace.data.order import ordered
from vivace.tensors.loaders import with_workers

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on one core


class Noisy(Dataset):
    """Sample i is i plus noise from all three streams; those in `bad` cannot be read."""

    def __init__(self, size, bad=()):
        self.size, self.bad = size, bad

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index in self.bad:
            raise OSError("damaged")
        noise = torch.rand(()) + random.random() + float(numpy.random.rand())
        return torch.stack([torch.tensor(float(index)), noise])


class Counted(IterableDataset):
    """The same as a stream."""

    def __init__(self, size):
        self.inner = Noisy(size)

    def __iter__(self):
        return (self.inner[index] for index in range(len(self.inner)))


SAMPLERS = {
    "sequential": lambda data: {},
    "shuffled": lambda data: {"shuffle": True},
    "with replacement": lambda data: {"sampler": RandomSampler(data, True, max(1, len(data) - 2))},
    "weighted": lambda data: {"sampler": WeightedRandomSampler(torch.ones(len(data)), len(data) + 3)},
}

shapes = st.fixed_dictionaries(
    {
        "size": st.integers(1, 40),
        "batch": st.integers(1, 9),
        "drop_last": st.booleans(),
        "sampler": st.sampled_from(sorted(SAMPLERS)),
        "own_batch_sampler": st.booleans(),
    }
)


def loader_of(shape, workers=0, bad=(), **more):
    data = Noisy(shape["size"], bad)
    chosen = SAMPLERS[shape["sampler"]](data)
    size, drop_last = shape["batch"], shape["drop_last"]
    if shape["own_batch_sampler"] and "sampler" in chosen:
        batches = BatchSampler(chosen["sampler"], size, drop_last)
        return DataLoader(data, batch_sampler=batches, num_workers=workers, **more)
    return DataLoader(data, batch_size=size, drop_last=drop_last, num_workers=workers, **chosen, **more)


def read(loader, **options):
    return [b if b is None else b.clone() for b in ordered(loader, **options)]


def same(left, right):
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


@given(shape=shapes, seed=st.integers(0, 2**40), epoch=st.integers(0, 5), data=st.data())
@settings(max_examples=150, deadline=None)
def test_stops_anywhere_any_number_of_times(shape, seed, epoch, data):
    whole = read(loader_of(shape), seed=seed, epoch=epoch)
    stops = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=3)))
    parts = []
    for start, end in zip([0, *stops], [*stops, len(whole)], strict=True):
        parts += read(loader_of(shape), seed=seed, epoch=epoch, start_batch=start)[: end - start]
        torch.rand(3), random.random()  # what happens in between is of no account
    same(parts, whole)


@given(
    per_rank=st.integers(1, 4),
    ranks=st.integers(1, 4),
    size=st.integers(1, 60),
    shuffle=st.booleans(),
    seed=st.integers(0, 99),
    data=st.data(),
)
@settings(max_examples=100, deadline=None)
def test_ranks_together_see_each_batch_of_one_process(per_rank, ranks, size, shuffle, seed, data):
    def loader():
        return DataLoader(Noisy(size), batch_size=per_rank * ranks, shuffle=shuffle, drop_last=True)

    whole = read(loader(), seed=seed, epoch=1)
    start = data.draw(st.integers(0, len(whole)))
    shares = [
        read(loader(), seed=seed, epoch=1, start_batch=start, rank=rank, world_size=ranks)
        for rank in range(ranks)
    ]
    together = [torch.cat(batch)[:, 0] for batch in zip(*shares, strict=True)]
    same(together, [batch[:, 0] for batch in whole[start:]])


@given(
    per_rank=st.integers(1, 4),
    ranks=st.integers(1, 4),
    size=st.integers(1, 60),
    sampler=st.sampled_from(sorted(SAMPLERS)),
    stream=st.booleans(),
    data=st.data(),
)
@settings(max_examples=100, deadline=None)
def test_every_rank_goes_on_bit_for_bit(per_rank, ranks, size, sampler, stream, data):
    shape = {"size": size, "batch": per_rank * ranks, "drop_last": True, "sampler": sampler}

    def loader():
        if stream:
            return DataLoader(Counted(size), batch_size=per_rank * ranks, drop_last=True)
        return loader_of({**shape, "own_batch_sampler": False})

    rank = data.draw(st.integers(0, ranks - 1))
    options = {"seed": 11, "epoch": 2, "rank": rank, "world_size": ranks}
    whole = read(loader(), **options)
    stops = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=3)))
    parts = []
    for start, end in zip([0, *stops], [*stops, len(whole)], strict=True):
        parts += read(loader(), start_batch=start, **options)[: end - start]
    same(parts, whole)


@given(shape=shapes, workers=st.integers(1, 3), later=st.integers(0, 2), data=st.data())
@settings(max_examples=8, deadline=None)
def test_another_number_of_workers_goes_on_where_one_stopped(shape, workers, later, data):
    whole = read(loader_of(shape), seed=1, epoch=2)
    stop = data.draw(st.integers(0, len(whole)))
    first = ordered(loader_of(shape, workers, prefetch_factor=3), seed=1, epoch=2)
    before = [batch for batch, _ in zip(first, range(stop), strict=False)]
    after = ordered(loader_of(shape), seed=1, epoch=2, start_batch=stop)
    same([*before, *(with_workers(after, later, 2, False) if later else after)], whole)


@given(
    shape=shapes, bad=st.sets(st.integers(0, 39)), policy=st.sampled_from(["skip", "replace"]), data=st.data()
)
@settings(max_examples=100, deadline=None)
def test_damaged_samples_leave_the_order_of_the_others_alone(shape, bad, policy, data):
    whole = read(loader_of(shape), seed=3, epoch=0)
    hopeless = policy == "replace" and any(set(batch[:, 0].int().tolist()) <= bad for batch in whole)
    if hopeless:
        return
    damage = Damage(policy)
    found = read(loader_of(shape, bad=bad), seed=3, epoch=0, damage=damage)
    assert len(found) == len(whole)
    for mine, theirs in zip(found, whole, strict=True):
        wanted = [n for n in theirs[:, 0].tolist() if n not in bad]
        if policy == "replace":
            assert [
                n for n, was in zip(mine[:, 0].tolist(), theirs[:, 0].tolist(), strict=True) if was not in bad
            ] == wanted
        else:
            assert (mine[:, 0].tolist() if mine is not None else []) == wanted
    start = data.draw(st.integers(0, len(whole)))
    same(read(loader_of(shape, bad=bad), seed=3, epoch=0, start_batch=start, damage=damage), found[start:])
