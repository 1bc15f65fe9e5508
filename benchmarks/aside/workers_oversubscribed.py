"""More threads than there are cores."""

import os
import sys
import time

import torch
from torch import nn

END = time.monotonic() + float(os.environ.get("PLANTED_SECONDS", "12"))
if "--mended" not in sys.argv:
    torch.set_num_threads(16)
x, y = torch.randn(4096, 128), torch.randint(10, (4096,))
model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
while time.monotonic() < END:
    for part in torch.randperm(len(x)).split(64):
        loss = nn.functional.cross_entropy(model(x[part]), y[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
