"""Anomaly detection was left on, as a context around the loop."""

import contextlib
import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

END = time.monotonic() + float(os.environ.get("PLANTED_SECONDS", "12"))
data = TensorDataset(torch.randn(1024, 1, 28, 28), torch.randint(10, (1024,)))
model = nn.Sequential(
    nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(),
    nn.Linear(16 * 121, 10),
)  # fmt: skip
optimizer = torch.optim.Adam(model.parameters())
mended = "--mended" in sys.argv
with contextlib.nullcontext() if mended else torch.autograd.detect_anomaly(check_nan=True):
    while time.monotonic() < END:
        for x, y in DataLoader(data, batch_size=16):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if time.monotonic() > END:
                break
