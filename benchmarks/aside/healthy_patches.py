"""A small vision transformer with bfloat16, clipping and a warm-up."""

import os
import time

import torch
from torch import nn

END = time.monotonic() + float(os.environ.get("PLANTED_SECONDS", "12"))


class Patches(nn.Module):
    """Patches of images, three layers."""

    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 192, 8, stride=8)
        layer = nn.TransformerEncoderLayer(192, 6, 768, batch_first=True, norm_first=True, activation="gelu")
        self.body = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(192, 100)

    def forward(self, x):
        return self.head(self.body(self.patch(x).flatten(2).transpose(1, 2)).mean(1))


x, y = torch.randn(256, 3, 64, 64), torch.randint(100, (256,))
model = Patches()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=50)
while time.monotonic() < END:
    for rows in torch.randperm(256).split(32):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
