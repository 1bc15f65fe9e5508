"""Gradients are clipped by value before they are unscaled."""

import os
import sys
import time

import torch
from torch import nn
from torch.nn.utils.clip_grad import clip_grad_value_
from torch.utils.data import DataLoader, TensorDataset

END = time.monotonic() + float(os.environ.get("PLANTED_SECONDS", "12"))
data = TensorDataset(torch.randn(2048, 128), torch.randint(10, (2048,)))
model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
while time.monotonic() < END:
    for x, y in DataLoader(data, batch_size=64):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        if "--mended" in sys.argv:
            scaler.unscale_(optimizer)
        clip_grad_value_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        if time.monotonic() > END:
            break
