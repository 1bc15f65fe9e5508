"""The loss adds a penalty while the model trains, and insists on knowing which mode it is in."""

import torch
from torch import nn

import vivace

REGULARIZE = 1e-3


def loss(model, batch):
    x, y = batch
    value = nn.functional.cross_entropy(model(x), y)
    if model.training:
        value = value + REGULARIZE * sum(p.abs().sum() for p in model.parameters())
    return value


def metric(model, batches):
    assert not model.training, "metrics are computed in evaluation mode"
    return -sum(loss(model, batch).item() for batch in batches)


def data():
    x = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.DataLoader(list(zip(x, (x[:, 0] > 0).long(), strict=True)), batch_size=12)


job = vivace.Job(
    model=lambda: nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 2)),
    data=data,
    loss=loss,
    metric=metric,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
)
