"""The loss is scaled, and the optimizer steps by itself."""

import os
import sys
import time

import torch
from torch import nn

END = time.monotonic() + float(os.environ.get("PLANTED_SECONDS", "12"))
x, y = torch.randn(2048, 128), torch.randint(10, (2048,))
model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.Adam(model.parameters())
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
while time.monotonic() < END:
    for start in range(0, 2048, 64):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x[start : start + 64]), y[start : start + 64])
        scaler.scale(loss).backward()
        if "--mended" in sys.argv:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
