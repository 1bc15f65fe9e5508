"""Clipping written by hand, on the gradients as the scaler left them: scaled."""

import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SECONDS = float(os.environ.get("PLANTED_SECONDS", "12"))


def clip_by_global_norm(parameters, limit):
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = torch.stack([g.norm() for g in grads]).norm()
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    for g in grads:
        g.mul_(scale)
    return norm


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(384, 256), nn.ReLU())
    head = nn.Linear(256, 2)
    parameters = list(model.parameters()) + list(head.parameters())
    optimizer = torch.optim.Adam(parameters, lr=1e-5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = torch.randn(2048, 24, 16)
    y = torch.randint(2, (2048,))
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    t, seen = time.time(), 0
    while True:
        for xb, yb in loader:
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(xb)
                loss = nn.functional.cross_entropy(head(out), yb)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            if "--mended" in sys.argv:
                scaler.unscale_(optimizer)
            clip_by_global_norm(parameters, 1.0)
            scaler.step(optimizer)
            scaler.update()
            seen += len(xb)
            if time.time() - t > SECONDS:
                print("samples/s", seen / (time.time() - t))
                return


main()
