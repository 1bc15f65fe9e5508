import numpy
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset

from vivace.errors import Refused
from vivace.tensors.loaders import (
    lengths_of,
    same_settings,
    settings_of,
    small_batch,
    that_iterate_themselves,
)


class WithNamesOfItsOwn(Dataset):
    """Its `collate` and `single` mean something else than they do to Vivace's own datasets."""

    single = True

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.full((2,), float(index))

    def collate(self, samples):
        raise AssertionError("the loader's collate_fn makes the batches")


def test_a_small_batch_is_made_by_the_loader_whatever_the_datasets_methods_are_called():
    assert small_batch(DataLoader(WithNamesOfItsOwn(), batch_size=3)).tolist() == [[0.0, 0.0], [1.0, 1.0]]


class OfUnknownLength(Dataset):
    """With a sampler of its own a DataLoader asks for no length, and for any keys."""

    def __init__(self, keys):
        self.keys = dict(keys)

    def __getitem__(self, key):
        return torch.full((2,), self.keys[key])


def test_a_dataset_without_a_length_gives_a_small_batch():
    loader = DataLoader(OfUnknownLength({3: 1.0, 5: 2.0}), batch_size=2, sampler=[5, 3])
    assert small_batch(loader).tolist() == [[1.0, 1.0], [2.0, 2.0]]


class ByName(Dataset):
    """Has no length, and its keys are texts."""

    def __getitem__(self, name):
        return {"a": torch.zeros(2), "b": torch.ones(3)}[name]


def test_samples_that_have_no_number_are_refused_in_words():
    loader = DataLoader(ByName(), batch_sampler=[["a"], ["b"]])
    for read in (lambda: small_batch(loader), lambda: lengths_of({"a": 1, "b": 2}, 1.0)):
        with pytest.raises(Refused, match="no sample of your dataset can be read by its number"):
            read()
    with pytest.raises(Refused, match="your dataset has no length"):
        lengths_of(ByName(), 1.0)


def test_a_sample_that_cannot_be_read_has_no_length():
    class Damaged(WithNamesOfItsOwn):
        def __getitem__(self, index):
            if index == 1:
                raise OSError("truncated")
            return super().__getitem__(index)

    assert lengths_of(Damaged(), 1.0) == [2, 0, 2, 2]


def test_settings_are_compared_by_value_and_large_arrays_by_identity():
    dataset = WithNamesOfItsOwn()
    dataset.sizes, dataset.data = [1, 2], numpy.zeros(4)
    both = ConcatDataset([WithNamesOfItsOwn(), dataset])
    before = settings_of(both)
    dataset.sizes = [1, 2]
    assert same_settings(settings_of(both), before)
    dataset.data = numpy.zeros(4)
    assert not same_settings(settings_of(both), before)


def test_a_kind_of_loader_made_from_two_others_is_told_once():
    class Base(DataLoader):
        pass

    class Left(Base):
        pass

    class Right(Base):
        pass

    class Both(Left, Right):
        def __iter__(self):
            yield from super().__iter__()

    assert list(that_iterate_themselves(Base)) == [Both]
