"""Every gradient is asked whether it is finite, one after another, twice a step."""

import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

END = time.monotonic() + float(os.environ.get("PLANTED_SECONDS", "12"))
data = TensorDataset(torch.randn(2048, 64), torch.randint(10, (2048,)))
layers = [part for _ in range(24) for part in (nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU())]
model = nn.Sequential(*layers, nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while time.monotonic() < END:
    for x, y in DataLoader(data, batch_size=32, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        if "--mended" not in sys.argv:
            for parameter in model.parameters():
                if torch.isnan(parameter.grad).any() or torch.isinf(parameter.grad).any():
                    raise SystemExit("gradients are broken")
        optimizer.step()
        if time.monotonic() > END:
            break
