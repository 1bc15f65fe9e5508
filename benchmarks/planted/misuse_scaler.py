"""bfloat16 with a GradScaler, which only float16 needs."""

import torch
from common import MENDED, fast, functional, mlp, rows, train

scaler = torch.amp.GradScaler("cpu", enabled=not MENDED)


def step(model, optimizer, inputs, labels):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = functional.cross_entropy(model(inputs), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


train(mlp(1024, 4), fast(rows(), 128), step=step)
