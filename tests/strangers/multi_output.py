"""A model that returns a dict of outputs, and a loss that weighs three tasks."""

import torch
from torch import nn
from torch.nn import functional as F

import vivace


class ThreeHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU())
        self.heads = nn.ModuleDict(
            {"edge": nn.Conv2d(8, 1, 1), "depth": nn.Conv2d(8, 1, 1), "kind": nn.Linear(8, 3)}
        )

    def forward(self, x):
        z = self.trunk(x)
        return {
            "edge": self.heads["edge"](z),
            "depth": self.heads["depth"](z),
            "kind": self.heads["kind"](z.mean((2, 3))),
            "aux": (z, None),
        }


def loss(model, batch):
    x, kind = batch
    out = model(x)
    edge = F.binary_cross_entropy_with_logits(out["edge"], (x > 0).float())
    return edge + 0.5 * F.l1_loss(out["depth"], x) + 0.1 * F.cross_entropy(out["kind"], kind)


def data():
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(6, 1, 16, 16, generator=g), torch.randint(3, (6,), generator=g)) for _ in range(6)]


job = vivace.Job(
    model=ThreeHeads,
    data=data,
    loss=loss,
    optimizer=lambda m: torch.optim.Adam(m.parameters(), lr=1e-3, amsgrad=True),
)
