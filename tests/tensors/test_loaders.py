import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from vivace.errors import Refused
from vivace.tensors.loaders import small_batch


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


def test_samples_without_numbers_are_refused():
    loader = DataLoader(OfUnknownLength({"cat": 1.0}), batch_size=1, sampler=["cat"])
    with pytest.raises(Refused, match=r"^no sample of your OfUnknownLength can be read by its number$"):
        small_batch(loader)
