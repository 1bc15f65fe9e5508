"""A physics fit in float64."""

import torch
from torch import nn

import vivace

torch.manual_seed(0)
t = torch.linspace(0, 6, 128, dtype=torch.float64).unsqueeze(1)
signal = torch.exp(-0.3 * t) * torch.cos(2 * t)

job = vivace.Job(
    model=lambda: nn.Sequential(
        nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    ).double(),
    data=lambda: torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(t, signal), batch_size=32, shuffle=True
    ),
    loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
    optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
)
