"""Linear layers with Adam."""

import torch
from common import fast, mlp, rows, train

model = mlp(1024, 4)
train(model, fast(rows(), 128), torch.optim.Adam(model.parameters(), lr=1e-3))
