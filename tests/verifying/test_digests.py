"""Two readings of data for which there was no time: their order is compared by indices, and their ends."""

import dataclasses

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from vivace.testing import jobs
from vivace.verifying.digests import first_other, in_one_order, read_epochs
from vivace.verifying.feeding import Reach

SAMPLES, BATCH = 320, 8


class Counted(Dataset):
    """Says which of its samples were loaded."""

    def __init__(self):
        self.loaded = set()

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        self.loaded.add(index)
        return torch.full((8,), float(index)), index % 4


class Backwards(Sampler):
    """The samples in turn, from some index on backwards; they may be named from the other end."""

    def __init__(self, first, negative=False):
        self.first, self.negative = first, negative

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        order = [*range(self.first), *range(SAMPLES - 1, self.first - 1, -1)]
        return iter([index - SAMPLES for index in order] if self.negative else order)


def reading(data):
    (found,) = read_epochs(dataclasses.replace(jobs.mlp(), data=data), "data", 1, Reach(0.0, 0.0))
    return found


def in_turn(dataset=None, **options):
    return reading(lambda: DataLoader(dataset or Counted(), batch_size=BATCH, **options))


def test_the_order_of_what_is_not_read_is_known_and_not_loaded():
    dataset = Counted()
    found = in_turn(dataset)
    assert not found.whole
    assert len(found.batches) == 8
    assert len(found.order) == SAMPLES // BATCH
    assert dataset.loaded == {*range(9 * BATCH), *range(SAMPLES - 3 * BATCH, SAMPLES)}
    assert in_one_order(found, in_turn())
    assert first_other([found], [in_turn()], "data") == ("", 0)


@pytest.mark.parametrize(("first", "batch"), [(160, 20), (SAMPLES - BATCH, 39)])
def test_another_order_late_in_an_epoch_is_found(first, batch):
    text, number = first_other([in_turn(sampler=Backwards(first))], [in_turn()], "data")
    assert text == f"batch {batch} of epoch 1 of the data has other samples, or in another order, than"
    assert number == batch


def test_equal_batches_under_other_indices_are_the_same_data():
    """Then their order cannot be told by indices; the ends still are."""
    named = Backwards(SAMPLES, negative=True)
    tensors = TensorDataset(torch.stack([Counted()[i][0] for i in range(SAMPLES)]))
    mine = reading(lambda: DataLoader(tensors, batch_size=BATCH, sampler=named))
    theirs = reading(lambda: DataLoader(tensors, batch_size=BATCH))
    assert first_other([mine], [theirs], "data") == ("", 0)
    assert not in_one_order(mine, theirs)
    ended = torch.stack([Counted()[i][0] + (i == SAMPLES - 1) for i in range(SAMPLES)])
    other = reading(lambda: DataLoader(TensorDataset(ended), batch_size=BATCH, sampler=named))
    assert first_other([other], [theirs], "data")[0] == "epoch 1 of the data ends with other batches than"


def test_all_tensors_that_differ_are_named():
    def of(*numbers):
        return reading(lambda: [tuple(torch.tensor([number]) for number in numbers)])

    for other, where in ((of(1, 0, 1), "tensor 2"), (of(0, 0, 0), "tensors 1, 2 and 3")):
        text, _ = first_other([of(1, 1, 1)], [other], "data")
        assert text == f"batch 0 of epoch 1 of the data is another one, in its {where}, than"


def test_data_of_another_length_are_other_data():
    shorter = TensorDataset(
        *(torch.stack(list(column)) for column in [[Counted()[i][0] for i in range(240)]])
    )
    longer = TensorDataset(torch.stack([Counted()[i][0] for i in range(SAMPLES)]))
    both = [reading(lambda data=data: DataLoader(data, batch_size=BATCH)) for data in (shorter, longer)]
    text, number = first_other([both[0]], [both[1]], "data")
    assert "batch 30 of epoch 1" in text
    assert number == 30


class Weighing:
    """Collates samples, and adds a weight that is no tensor and the file that they come from."""

    def __init__(self, weight, folder="/one"):
        self.weight, self.folder = weight, folder

    def __call__(self, samples):
        found = torch.utils.data.default_collate(samples)
        return [*found, {"weight": self.weight, "file": f"{self.folder}/{len(samples)}.png"}]


@pytest.mark.parametrize("other", [2.0, numpy.full(3, 2.0), "heavy"])
def test_what_a_batch_holds_beside_tensors_counts(other):
    mine, theirs = (in_turn(collate_fn=Weighing(weight)) for weight in (1.0, other))
    text, number = first_other([mine], [theirs], "data")
    assert text == "batch 0 of epoch 1 of the data holds other numbers or texts beside its tensors than"
    assert number == 0


def test_the_folder_of_a_file_does_not_count():
    mine, theirs = (in_turn(collate_fn=Weighing(1.0, folder)) for folder in ("/one", "/other"))
    assert first_other([mine], [theirs], "data") == ("", 0)
