"""A learning rate at which the weights run away."""

import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

END = time.monotonic() + float(os.environ.get("PLANTED_SECONDS", "12"))
data = TensorDataset(torch.randn(2048, 64), torch.randn(2048, 1))
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3 if "--mended" in sys.argv else 50.0)
while time.monotonic() < END:
    for x, y in DataLoader(data, batch_size=64):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if time.monotonic() > END:
            break
