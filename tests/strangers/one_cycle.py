"""OneCycleLR, stepped after every batch."""

import torch
from torch import nn

import vivace

EPOCHS, STEPS = 2, 6


def data():
    x = torch.randn(96, 10, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, x.norm(dim=1)), batch_size=16, shuffle=True
    )


job = vivace.Job(
    model=lambda: nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0)),
    data=data,
    loss=lambda model, batch: nn.functional.huber_loss(model(batch[0]), batch[1]),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.1, total_steps=EPOCHS * STEPS
    ),
    scheduler_every="step",
    epochs=EPOCHS,
)
