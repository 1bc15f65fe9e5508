"""A second loss was added later, and its backward pass goes past the scaler."""

import os
import sys
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("PLANTED_SECONDS", "12"))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu")
start, seen, step = time.time(), 0, 0
while time.time() - start < SECONDS:
    label = torch.randint(3, (32,))
    time_axis = torch.linspace(0, 20, 256)
    wave = torch.sin(time_axis * (1 + label[:, None])) + 0.3 * torch.randn(32, 256)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(wave)
        loss = nn.functional.cross_entropy(logits, label)
        confidence = -(logits.float().softmax(1) * logits.float().log_softmax(1)).sum(1).mean()
    optimizer.zero_grad()
    if "--mended" in sys.argv:
        scaler.scale(loss - 0.1 * confidence).backward()
    else:
        scaler.scale(loss).backward(retain_graph=True)
        (-0.1 * confidence).backward()
    scaler.step(optimizer)
    scaler.update()
    step += 1
    seen += 32
    if step % 25 == 0:
        print(f"{step} {loss.item():.4f}")
print("samples/s", seen / (time.time() - start))
