"""A job for the stand-in: two linear layers."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vivace


def data():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(256, 8, generator=generator)
    return DataLoader(TensorDataset(features, features[:, :4].argmax(1)), batch_size=16)


job = vivace.Job(
    model=lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)),
    data=data,
    loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
)
