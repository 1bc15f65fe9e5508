"""Each sample is waited for, as on a slow disk or network."""

import time

import torch
from common import MENDED, DataLoader, Dataset, small_cnn, train


class Slow(Dataset):
    """Opens a file a sample."""

    def __len__(self):
        return 1024

    def __getitem__(self, index):
        if not MENDED:
            time.sleep(0.001)  # what a network file system takes to open
        return torch.full((3, 32, 32), index / 1024), index % 10


train(small_cnn(16), DataLoader(Slow(), batch_size=32, shuffle=True))
