"""Weights and data came as float64 from NumPy."""

import torch
from common import MENDED, TensorDataset, fast, mlp, train

kind = torch.float32 if MENDED else torch.float64
data = TensorDataset(torch.randn(4096, 256, dtype=kind), torch.randint(10, (4096,)))
train(mlp(1024).to(kind), fast(data, 128))
