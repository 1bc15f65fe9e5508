"""Gradients are clipped while they are still scaled."""

import torch
from common import MENDED, fast, functional, mlp, nn, rows, train

scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)


def step(model, optimizer, inputs, labels):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = functional.cross_entropy(model(inputs), labels)
    scaler.scale(loss).backward()
    if MENDED:
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


train(mlp(256), fast(rows()), step=step)
