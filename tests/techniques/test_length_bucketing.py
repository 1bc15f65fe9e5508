from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from vivace.data.order import ordered
from vivace.errors import Refused
from vivace.inspection import inspect
from vivace.job import Job
from vivace.ledger import Observation
from vivace.plan import Plan
from vivace.session.opening import start
from vivace.technique import registry
from vivace.techniques.length_bucketing.buckets import Buckets
from vivace.tensors.loaders import lengths_of
from vivace.testing import TINY_JOBS, TechniqueContract

LengthBucketing = registry.find("length_bucketing")


class Sentences(Dataset):
    """Sample i is i, as often as its length says."""

    def __init__(self, lengths):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return torch.full((self.lengths[index],), index), index % 4


class ByKey(Sentences):
    """Is asked for its samples by text, and answers to numbers as well."""

    def __init__(self):
        super().__init__([1, 2, 3])

    def __getitem__(self, key):
        return super().__getitem__(int(str(key).removeprefix("k")))


LENGTHS = [3 + 37 * n % 29 for n in range(47)]


def collate(samples):
    return pad_sequence([s for s, _ in samples], True, -1), torch.tensor([label for _, label in samples])


def loader_of(lengths=LENGTHS, batch_size=4, **settings):
    return DataLoader(Sentences(lengths), batch_size, shuffle=True, collate_fn=collate, **settings)


def sentences():
    return Job(
        model=lambda: nn.EmbeddingBag(64, 4, padding_idx=63),
        data=lambda: loader_of(),
        loss=lambda model, batch: functional.cross_entropy(model(batch[0] % 64), batch[1]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    )


class TestLengthBucketing(TechniqueContract):
    technique = LengthBucketing
    jobs: ClassVar = {"mlp": TINY_JOBS["mlp"], "sentences": sentences}


@pytest.fixture
def session():
    with start(sentences(), Plan([LengthBucketing(window=6)]), inspect()) as found:
        yield found


def read(session, loader, **options):
    return [batch[0] for batch in session.batches(ordered(loader, seed=2, epoch=1, **options))]


def padding(batches):
    return sum(int((batch == -1).sum()) for batch in batches) / sum(batch.numel() for batch in batches)


def test_each_sample_comes_once_with_less_padding(session):
    plain = [batch[0] for batch in ordered(loader_of(), seed=2, epoch=1)]
    found = read(session, loader_of())
    assert [len(batch) for batch in found] == [len(batch) for batch in plain]
    assert sorted(int(row[0]) for batch in found for row in batch) == list(range(len(LENGTHS)))
    assert padding(found) < 0.6 * padding(plain)
    before, after = session.build.notes["length_bucketing"]
    assert after < before
    seen = Observation({}, {}, 0, 0.0, notes=session.build.notes)
    assert "padding instead of" in LengthBucketing().confirm(seen, seen)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=2, max_size=60),
    batch_size=st.integers(1, 6),
    window=st.integers(2, 9),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_a_later_start_gives_the_rest(lengths, batch_size, window, data):
    def batches(start):
        source = ordered(loader_of(lengths, batch_size), seed=4, epoch=0, start_batch=start).batch_sampler
        buckets = Buckets(source, lengths, window)
        assert len(buckets) == len(source)
        return list(buckets)

    whole = batches(0)
    start = data.draw(st.integers(0, len(whole)))
    assert batches(start) == whole[start:]


def test_a_loader_that_vivace_did_not_order_is_served_too(session):
    torch.manual_seed(1)
    found = [int(row[0]) for batch, _ in session.batches(loader_of()) for row in batch]
    assert sorted(found) == list(range(len(LENGTHS)))


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        ([1, 2], "the data is a list"),
        (loader_of([5] * 8), "all samples have the length 5"),
        (
            DataLoader(ByKey(), batch_sampler=[["k1"], ["k2"]]),
            "by keys, such as 'k1', and not by their numbers",
        ),
        (DataLoader(Sentences(LENGTHS), batch_size=None), "your dataset gives whole batches"),
    ],
)
def test_what_cannot_gain_is_refused(session, loader, reason):
    with pytest.raises(Refused, match=f"length_bucketing: .*{reason}"):
        session.batches(loader)


def test_lengths_are_found_in_samples_of_all_kinds_and_not_for_ever():
    assert lengths_of([{"label": 3, "text": "four"}, {"label": 1, "text": "a"}], 1.0) == [4, 1]
    assert lengths_of([(torch.tensor(3), [1, 2, 3])], 1.0) == [3]
    assert lengths_of([torch.zeros(5, 2), torch.zeros(())], 1.0) == [5, 1]
    with pytest.raises(Refused, match="reading the lengths of 70 samples would take too long"):
        lengths_of(["word"] * 70, 0.0)
