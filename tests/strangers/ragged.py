"""37 samples in batches of 8: the last batch has 5."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vivace


def data():
    x = torch.randn(37, 10, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.argmax(1)), batch_size=8, shuffle=True, drop_last=False)


job = vivace.Job(
    model=lambda: nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10)),
    data=data,
    loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    epochs=2,
)
