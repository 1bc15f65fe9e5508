"""Outputs are collected for the epoch's metric, with all that they remember."""

import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

END = time.monotonic() + float(os.environ.get("PLANTED_SECONDS", "12"))
data = TensorDataset(torch.randn(60000, 32), torch.randint(5, (60000,)))
model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while time.monotonic() < END:
    outputs = []
    for x, y in DataLoader(data, batch_size=32):
        optimizer.zero_grad()
        output = model(x)
        outputs.append(output.detach() if "--mended" in sys.argv else output)
        nn.functional.cross_entropy(output, y).backward()
        optimizer.step()
        if time.monotonic() > END:
            break
    print(torch.cat(outputs).argmax(1).float().mean().item())
