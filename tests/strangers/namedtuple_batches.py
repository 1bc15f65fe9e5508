"""Batches are a NamedTuple; an optional field is None."""

from typing import NamedTuple

import torch
from torch import nn

from vivace import Job


class Example(NamedTuple):
    image: torch.Tensor
    target: torch.Tensor
    weight: torch.Tensor | None


def collate(rows):
    g = torch.Generator().manual_seed(int(rows[0]))
    image = torch.randn(len(rows), 1, 12, 12, generator=g)
    return Example(image, image.flatten(1).mean(1), None)


def loss(model, batch):
    assert isinstance(batch, Example)
    error = (model(batch.image).squeeze(1) - batch.target) ** 2
    return error.mean() if batch.weight is None else (error * batch.weight).mean()


job = Job(
    model=lambda: nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(800, 1)),
    data=lambda: torch.utils.data.DataLoader(list(range(48)), batch_size=12, collate_fn=collate),
    loss=loss,
    optimizer=lambda model: torch.optim.Adam(model.parameters()),
)
