"""Batches come from a plain generator, without any loader."""

import numpy as np
import torch
from torch import nn

import vivace


def batches():
    rng = np.random.default_rng(5)
    for _ in range(4):
        x = rng.normal(size=(16, 5)).astype("float32")
        yield torch.from_numpy(x), torch.from_numpy(x.max(1))


job = vivace.Job(
    model=lambda: nn.Sequential(nn.Linear(5, 32), nn.SiLU(), nn.Linear(32, 1)),
    data=batches,
    loss=lambda model, batch: (model(batch[0])[:, 0] - batch[1]).abs().mean(),
    optimizer=lambda model: torch.optim.NAdam(model.parameters()),
)
