"""bfloat16 autocast around matrices that are too small to gain."""

import torch
from common import MENDED, fast, functional, mlp, rows, train


def step(model, optimizer, inputs, labels):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not MENDED):
        loss = functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()


train(mlp(64, 12, inputs=64), fast(rows(2048, inputs=64), 32), step=step)
