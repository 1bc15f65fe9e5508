"""Batches are a frozen dataclass that a collate function makes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

import vivace


@dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    y: torch.Tensor
    names: list[str]


def collate(rows: list[int]) -> Batch:
    x = torch.tensor([[float(r), float(r % 3), float(r % 5)] for r in rows]) / 10
    return Batch(x=x, y=x.sum(1, keepdim=True), names=[str(r) for r in rows])


job = vivace.Job(
    model=lambda: nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 1)),
    data=lambda: torch.utils.data.DataLoader(range(64), batch_size=16, shuffle=True, collate_fn=collate),
    loss=lambda model, batch: nn.functional.mse_loss(model(batch.x), batch.y),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-2),
)
