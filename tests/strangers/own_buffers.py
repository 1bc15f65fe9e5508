"""A model that keeps a moving average and a counter of its own, changed in forward."""

import torch
from torch import nn

import vivace


class Whitened(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("seen", torch.tensor(0))
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
                self.seen += len(x)
        return self.linear(x - self.mean)


job = vivace.Job(
    model=Whitened,
    data=lambda: [torch.randn(16, 8, generator=torch.Generator().manual_seed(i)) + 1 for i in range(6)],
    loss=lambda model, x: (model(x) - x).square().mean(),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
)
