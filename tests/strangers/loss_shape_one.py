"""The loss is a tensor of the shape (1,), as a weighted sum often is."""

import torch
from torch import nn

import vivace

weight = torch.ones(1)


def loss(model, batch):
    return weight * nn.functional.mse_loss(model(batch), batch)


job = vivace.Job(
    model=lambda: nn.Sequential(nn.Linear(12, 4), nn.Linear(4, 12)),
    data=lambda: [torch.randn(8, 12, generator=torch.Generator().manual_seed(i)) for i in range(6)],
    loss=loss,
    optimizer=lambda model: torch.optim.Adagrad(model.parameters()),
)
