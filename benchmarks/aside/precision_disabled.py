"""Autocast is on, and the model switches it off for itself."""

import os
import sys
import time

import torch
from torch import nn

END = time.monotonic() + float(os.environ.get("PLANTED_SECONDS", "12"))


class Careful(nn.Module):
    """Computes in float32 whatever is around it."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU())
        self.head = nn.Linear(1024, 10)

    def forward(self, x):
        with torch.autocast("cpu", enabled="--mended" in sys.argv, dtype=torch.bfloat16):
            return self.head(self.body(x))


x, y = torch.randn(2048, 512), torch.randint(10, (2048,))
model = Careful()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
while time.monotonic() < END:
    for start in range(0, len(x), 128):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x[start : start + 128]), y[start : start + 128])
        loss.backward()
        optimizer.step()
