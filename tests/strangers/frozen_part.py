"""Fine-tuning: the backbone is frozen and in evaluation mode, only the head trains."""

import torch
import torch.nn.functional as F
from torch import nn

import vivace


class FineTuned(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2)
        )
        self.head = nn.Linear(64, 5)
        for p in self.backbone.parameters():
            p.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x):
        with torch.no_grad():
            features = self.backbone(x).flatten(1)
        return self.head(features)


def data():
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 3, 16, 16, generator=g), torch.randint(5, (8,), generator=g)) for _ in range(5)]


job = vivace.Job(
    model=FineTuned,
    data=data,
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    optimizer=lambda model: torch.optim.Adam(filter(lambda p: p.requires_grad, model.parameters()), lr=1e-3),
)
