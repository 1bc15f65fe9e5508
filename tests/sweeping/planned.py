"""A job with a technique that keeps its promise at a width of 4, breaks it at 8, and declines 16."""

import dataclasses

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import vivace
from vivace import Card, Numerics, Seam, Stage, Technique


@vivace.register
@dataclasses.dataclass(frozen=True)
class Narrow(Technique):
    """Makes nothing faster."""

    name = "planted_narrow"
    card = Card(Stage.MODEL, Numerics.EXACT, "planted", "tests")

    def apply(self, build):
        width = build.model[0].out_features
        build.require(width < 16, f"the model is {width} wide")
        build.wrap(Seam.FORWARD, lambda following, batch: following(batch) * (1.0 if width < 8 else 1.5))

    def confirm(self, seen, reference):
        return "it was planted"


def job(width: int = 4, lr: float = 0.1) -> vivace.Job:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 6, generator=generator)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    return vivace.Job(
        model=lambda: nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 2)),
        data=lambda: DataLoader(data, batch_size=16),
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr),
        metric=lambda model, batches: (
            sum((model(a).argmax(1) == b).float().mean().item() for a, b in batches) / 4
        ),
        epochs=2,
    )
