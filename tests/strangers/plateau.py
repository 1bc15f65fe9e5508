"""The learning rate falls when the validation score stops rising."""

import torch
from torch import nn

import vivace


def rows(seed):
    x = torch.randn(64, 10, generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16
    )


def score(model, batches):
    return -sum(nn.functional.mse_loss(model(x), y).item() for x, y in batches)


job = vivace.Job(
    model=lambda: nn.Linear(10, 1),
    data=lambda: rows(0),
    loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=1),
    validation=lambda: rows(1),
    metric=score,
    epochs=4,
)
