import torch
from torch.utils.data import DataLoader, Dataset

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
