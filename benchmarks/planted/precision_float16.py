"""float16 autocast where the processor has no fast float16."""

import torch
from common import MENDED, fast, functional, mlp, rows, train

scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=not MENDED)


def step(model, optimizer, inputs, labels):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16, enabled=not MENDED):
        loss = functional.cross_entropy(model(inputs), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


train(mlp(512), fast(rows()), step=step)
