"""No weight decay on norms and biases, and another learning rate for the head; a LambdaLR over both."""

import torch
from torch import nn

import vivace


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU())
        self.head = nn.Linear(32, 3)

    def forward(self, x):
        return self.head(self.body(x))


def optimizer(model):
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 1e-2}], lr=1e-3
    )


def data():
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.DataLoader(
        [(row, int(row[:3].argmax())) for row in x], batch_size=16, shuffle=True
    )


job = vivace.Job(
    model=Net,
    data=data,
    loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    optimizer=optimizer,
    scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
        optimizer, [lambda e: 0.9**e, lambda e: 0.8**e]
    ),
    epochs=2,
)
