"""Autocast is entered around the loss alone; the model runs outside of it."""

import torch
from common import MENDED, fast, functional, mlp, rows, train


def step(model, optimizer, inputs, labels):
    optimizer.zero_grad()
    if MENDED:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = functional.cross_entropy(model(inputs), labels)
    else:
        output = model(inputs)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = functional.cross_entropy(output, labels)
    loss.backward()
    optimizer.step()


train(mlp(1024, 4), fast(rows(), 128), step=step)
