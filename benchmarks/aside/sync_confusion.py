"""A confusion matrix is filled one answer at a time."""

import os
import sys
import time

import torch
from torch import nn

END = time.monotonic() + float(os.environ.get("PLANTED_SECONDS", "12"))
x, y = torch.randn(4096, 128), torch.randint(10, (4096,))
model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.Adam(model.parameters())
matrix = [[0] * 10 for _ in range(10)]
while time.monotonic() < END:
    for rows in torch.randperm(4096).split(128):
        output = model(x[rows])
        loss = nn.functional.cross_entropy(output, y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if "--mended" in sys.argv:
            torch.bincount(10 * y[rows] + output.argmax(1), minlength=100)
            continue
        for truth, guess in zip(y[rows], output.argmax(1), strict=True):
            matrix[int(truth)][int(guess)] += 1
