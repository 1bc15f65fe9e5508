"""A running average of the loss that was never detached: each step's graph hangs on the one before."""

import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SECONDS = float(os.environ.get("PLANTED_SECONDS", "12"))


class Model(nn.Module):
    """Two convolutions."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU())
        self.fc = nn.Linear(32 * 12 * 12, 10)

    def forward(self, x):
        return self.fc(self.conv(x).flatten(1))


class Experiment:
    """Model, optimizer and loop in one object."""

    def __init__(self):
        self.model = Model()
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.average = None
        data = TensorDataset(torch.randn(2048, 1, 28, 28), torch.randint(10, (2048,)))
        self.loader = DataLoader(data, batch_size=16, shuffle=True)

    def fit(self):
        t, seen = time.time(), 0
        while True:
            for x, y in self.loader:
                logits = self.model(x)
                loss = nn.functional.cross_entropy(logits, y)
                self.opt.zero_grad()
                loss.backward(retain_graph="--mended" not in sys.argv)
                self.opt.step()
                value = loss.detach() if "--mended" in sys.argv else loss
                self.average = value if self.average is None else 0.98 * self.average + 0.02 * value
                seen += len(x)
                if time.time() - t > SECONDS:
                    print("samples/s", seen / (time.time() - t))
                    return


Experiment().fit()
