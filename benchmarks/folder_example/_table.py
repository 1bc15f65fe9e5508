"""The training that the examples edit: a small classifier of table rows."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import vivace

torch.set_num_threads(1)


def data():
    """Rows whose class is their largest feature among the first four."""
    rows = torch.randn(128, 12, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(rows, rows[:, :4].argmax(1)), batch_size=16, shuffle=True)


def loss(model, batch):
    """The mean cross entropy."""
    return functional.cross_entropy(model(batch[0]), batch[1])


job = vivace.Job(
    model=lambda: nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4)),
    data=data,
    loss=loss,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    on_gradients=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
)
