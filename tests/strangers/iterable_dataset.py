"""A stream of samples that knows no length, and shards itself over loader workers."""

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import vivace


class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        first, stride = (0, 1) if info is None else (info.id, info.num_workers)
        for i in range(first, 80, stride):
            x = torch.randn(6, generator=torch.Generator().manual_seed(i))
            yield x, x.sum()


job = vivace.Job(
    model=lambda: nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0)),
    data=lambda: DataLoader(Stream(), batch_size=16),
    loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
    optimizer=lambda model: torch.optim.Adam(model.parameters()),
)
