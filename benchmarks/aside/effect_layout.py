"""channels-last for a model that has no image in it."""

import os
import sys
import time

import torch
from torch import nn

END = time.monotonic() + float(os.environ.get("PLANTED_SECONDS", "12"))
x, y = torch.randn(4096, 256), torch.randint(10, (4096,))
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
if "--mended" not in sys.argv:
    model = model.to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while time.monotonic() < END:
    for rows in torch.randperm(4096).split(128):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
