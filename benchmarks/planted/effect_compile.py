"""torch.compile is called, and its result thrown away."""

import torch
from common import MENDED, fast, mlp, rows, train

model = mlp(256)
if not MENDED:
    torch.compile(model)
train(model, fast(rows()))
