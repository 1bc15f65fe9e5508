"""bfloat16 autocast that pays."""

import torch
from common import fast, functional, mlp, rows, train


def step(model, optimizer, inputs, labels):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()


train(mlp(2048, 4), fast(rows(), 256), step=step)
