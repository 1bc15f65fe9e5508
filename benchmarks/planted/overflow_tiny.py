"""float16 without a scaler: most gradients are below its normal numbers."""

import torch
from common import MENDED, fast, functional, mlp, rows, train

scaler = torch.amp.GradScaler("cpu", enabled=MENDED, init_scale=2.0**13)


def step(model, optimizer, inputs, labels):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = functional.cross_entropy(model(inputs), labels) * 1e-2
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


train(mlp(256), fast(rows()), step=step)
