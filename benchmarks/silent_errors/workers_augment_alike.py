# expect: different
"""Each worker has a copy of one NumPy generator: different samples get the same augmentation.

Stack Overflow, question 67180955 (`stackoverflow-67180955` of TrainCheck's evaluation).
"""

import dataclasses

import numpy
import torch
from _pictures import LABELS, PICTURES, TRAINED, job
from torch.utils.data import DataLoader, Dataset


class Shifted(Dataset):
    """Digits, each moved by up to a pixel; `numbers` draws how far, torch's own stream without."""

    def __init__(self, numbers=None):
        self.numbers = numbers

    def __len__(self):
        return TRAINED

    def __getitem__(self, index):
        """One digit."""
        shift = torch.randint(-1, 2, (2,)) if self.numbers is None else self.numbers.integers(-1, 2, 2)
        return torch.roll(PICTURES[index], tuple(int(s) for s in shift), (1, 2)), LABELS[index]


def loader(numbers=None):
    """Two workers."""
    return DataLoader(Shifted(numbers), batch_size=32, shuffle=True, num_workers=2)


job = dataclasses.replace(job, data=loader)
edited = dataclasses.replace(job, data=lambda: loader(numpy.random.default_rng(0)))
