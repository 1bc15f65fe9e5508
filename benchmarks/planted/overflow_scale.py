"""Gradients overflow again and again: the scaler skips steps."""

import torch
from common import MENDED, fast, functional, mlp, rows, train

# Grows after every step that went well, and so runs into the overflow every few steps.
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15, growth_interval=10**6 if MENDED else 2)


def step(model, optimizer, inputs, labels):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = functional.cross_entropy(model(inputs), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


train(mlp(256), fast(rows()), step=step)
