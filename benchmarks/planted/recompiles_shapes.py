"""Every batch has another length, and each is compiled anew."""

import random

import torch
from common import MENDED, fast, functional, mlp, rows, train

random.seed(0)
model = mlp(128, 3)
compiled = torch.compile(model, dynamic=MENDED, backend="aot_eager")
torch._dynamo.config.recompile_limit = 1000


def step(model, optimizer, inputs, labels):
    length = random.randrange(16, 256)
    optimizer.zero_grad()
    loss = functional.cross_entropy(compiled(inputs[:length]), labels[:length])
    loss.backward()
    optimizer.step()


train(model, fast(rows(), 256), step=step)
