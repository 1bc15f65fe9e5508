"""The compiled model takes a list whose length differs from batch to batch."""

import os
import random
import sys
import time

import torch
from torch import nn

END = time.monotonic() + float(os.environ.get("PLANTED_SECONDS", "12"))
random.seed(0)


class Weighted(nn.Module):
    """Scales its features by a list of factors."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(64, 128), nn.Linear(128, 8)

    def forward(self, x, factors):
        hidden = self.body(x).relu()
        for factor in factors:
            hidden = hidden * factor
        return self.head(hidden)


x, y = torch.randn(4096, 64), torch.randint(8, (4096,))
model = torch.compile(Weighted(), backend="aot_eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while time.monotonic() < END:
    for rows in torch.randperm(4096).split(64):
        number = 4 if "--mended" in sys.argv else random.randrange(1, 60)
        loss = nn.functional.cross_entropy(model(x[rows], [1.0] * number), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if time.monotonic() > END:
            break
