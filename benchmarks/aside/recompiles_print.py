"""A debugging aid in the forward pass cuts the compiled graph."""

import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

END = time.monotonic() + float(os.environ.get("PLANTED_SECONDS", "12"))


class Checked(nn.Module):
    """Looks at its own activations."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
            if "--mended" not in sys.argv and float(x.abs().max()) > 1e6:
                print("activations run away", file=sys.stderr)
        return self.head(x)


data = TensorDataset(torch.randn(2048, 64), torch.randint(3, (2048,)))
model = Checked()
model.compile(backend="aot_eager")
optimizer = torch.optim.Adam(model.parameters())
while time.monotonic() < END:
    for x, y in DataLoader(data, batch_size=128):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if time.monotonic() > END:
            break
