"""Large batches are copied to the device from pageable memory, for a model that is small."""

import torch
from common import DEVICE, LARGE, MENDED, learn, train
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

size = 2**20 if LARGE else 2**10
model = nn.Linear(size, 10).to(DEVICE)
data = TensorDataset(torch.randn(64, 64, size), torch.randint(10, (64, 64)))
batches = DataLoader(data, batch_size=None, pin_memory=MENDED and LARGE)


def step(optimizer, inputs, labels):
    learn(model, optimizer, inputs.to(DEVICE, non_blocking=MENDED), labels.to(DEVICE, non_blocking=MENDED))


train(model, batches, step)
