"""Gradients are divided by the scale in the loop, and again by the scaler."""

import torch
from common import MENDED, fast, functional, mlp, rows, train

scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)


def step(model, optimizer, inputs, labels):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = functional.cross_entropy(model(inputs), labels)
    scaler.scale(loss).backward()
    if not MENDED:
        scale = scaler.get_scale()
        for parameter in model.parameters():
            parameter.grad /= scale
    scaler.step(optimizer)
    scaler.update()


train(mlp(256), fast(rows()), step=step)
