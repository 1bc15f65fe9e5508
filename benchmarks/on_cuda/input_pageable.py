"""Large batches are copied to the device from pageable memory, for a model that is small.

Mended they lie in pinned memory from the start: a loader without workers pins in the loop's own time.
"""

import torch
from common import DEVICE, LARGE, MENDED, learn, train
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

size = 2**20 if LARGE else 2**10
model = nn.Linear(size, 10).to(DEVICE)
inputs, labels = torch.rand(16, 64, size), torch.randint(10, (16, 64))
if MENDED and LARGE:
    inputs, labels = inputs.pin_memory(), labels.pin_memory()
batches = DataLoader(TensorDataset(inputs, labels), batch_size=None)


def step(optimizer, inputs, labels):
    learn(model, optimizer, inputs.to(DEVICE, non_blocking=MENDED), labels.to(DEVICE, non_blocking=MENDED))


train(model, batches, step)
