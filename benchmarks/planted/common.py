"""What the planted scripts share: small real models, random data, and the loop that every tutorial has."""

from __future__ import annotations

import os
import sys
import time

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

MENDED = "--mended" in sys.argv
SECONDS = float(os.environ.get("PLANTED_SECONDS", "12"))  # long enough for every window of the profile
STEPS = int(os.environ.get("PLANTED_STEPS", "0"))  # in place of the time

torch.manual_seed(0)


def images(count=1024, size=32, classes=10):
    """Random images and labels."""
    return TensorDataset(torch.randn(count, 3, size, size), torch.randint(classes, (count,)))


def small_cnn(width=32):
    """Three convolutions with BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, stride=2),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(16 * width, 10),
    )


def mlp(width=512, layers=3, inputs=256):
    """Linear layers and ReLU."""
    body = [nn.Linear(inputs, width), nn.ReLU()]
    for _ in range(layers - 2):
        body += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*body, nn.Linear(width, 10))


def rows(count=4096, inputs=256):
    """Random rows and labels."""
    return TensorDataset(torch.randn(count, inputs), torch.randint(10, (count,)))


class Whole(Dataset):
    """A data set that hands out whole batches by one indexing."""

    def __init__(self, data, batch):
        self.tensors, self.batch = data.tensors, batch

    def __len__(self):
        return len(self.tensors[0]) // self.batch

    def __getitem__(self, index):
        part = slice(index * self.batch, (index + 1) * self.batch)
        return tuple(tensor[part] for tensor in self.tensors)


def fast(data, batch=32):
    """A loader that costs next to nothing."""
    return DataLoader(Whole(data, batch), batch_size=None, shuffle=True)


def train(model, loader, optimizer=None, loss=functional.cross_entropy, after=None, step=None):
    """The tutorial loop, for a few seconds; `after(loss, output, labels)` runs in each step."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    end, steps = time.monotonic() + SECONDS, 0

    def over():
        return steps >= STEPS if STEPS else time.monotonic() > end

    while not over():
        for inputs, labels in loader:
            steps += 1
            if step is not None:
                step(model, optimizer, inputs, labels)
            else:
                optimizer.zero_grad()
                output = model(inputs)
                value = loss(output, labels)
                value.backward()
                optimizer.step()
                if after is not None:
                    after(value, output, labels)
            if over():
                break
