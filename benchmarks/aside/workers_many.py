"""Eight workers for samples that lie in memory."""

import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

END = time.monotonic() + float(os.environ.get("PLANTED_SECONDS", "12"))
mended = "--mended" in sys.argv
data = TensorDataset(torch.randn(20000, 32), torch.randn(20000, 1))
loader = DataLoader(
    data, batch_size=16, shuffle=True, num_workers=0 if mended else 8, persistent_workers=not mended
)
model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
while time.monotonic() < END:
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if time.monotonic() > END:
            break
