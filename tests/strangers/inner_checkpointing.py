"""Gradient checkpointing inside the model, with dropout in the part that is computed again."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import vivace


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 32)) for _ in range(3)
        )
        self.out = nn.Linear(32, 1)

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.out(x)


def data():
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :1]), batch_size=16)


job = vivace.Job(
    model=Deep,
    data=data,
    loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
)
