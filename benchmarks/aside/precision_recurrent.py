"""bfloat16 autocast around a small recurrent network, step by step."""

import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

END = time.monotonic() + float(os.environ.get("PLANTED_SECONDS", "12"))
enabled = "--mended" not in sys.argv


class Cells(nn.Module):
    """A GRU cell over a sequence."""

    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRUCell(16, 48), nn.Linear(48, 4)

    def forward(self, x):
        state = x.new_zeros(x.shape[0], 48)
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return self.out(state)


data = TensorDataset(torch.randn(512, 20, 16), torch.randint(4, (512,)))
model = Cells()
optimizer = torch.optim.RMSprop(model.parameters())
while time.monotonic() < END:
    for x, y in DataLoader(data, batch_size=32, shuffle=True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if time.monotonic() > END:
            break
