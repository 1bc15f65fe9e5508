"""A replay buffer without an end."""

import os
import sys
import time
from collections import deque

import torch
from torch import nn

END = time.monotonic() + float(os.environ.get("PLANTED_SECONDS", "12"))
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
buffer = deque(maxlen=8 if "--mended" in sys.argv else None)
while time.monotonic() < END:
    buffer.append((torch.randn(1024, 64), torch.randn(1024, 4)))
    states, targets = buffer[-1]
    chosen = torch.randint(1024, (256,))
    loss = nn.functional.smooth_l1_loss(model(states[chosen]), targets[chosen])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
