"""Sizes that grow a little in every step, in so little memory that the allocator gives back and starts anew.

As batches do that are sorted by length: no block that it keeps is ever large enough for the next step.
"""

import torch
from common import DEVICE, LARGE, MENDED, learn, train
from torch import nn

WIDTH, FEWEST, MOST = (2**14, 1024, 4096) if LARGE else (64, 8, 32)
model = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)).to(DEVICE)
inputs, labels = torch.randn(MOST, 64, device=DEVICE), torch.randint(10, (MOST,), device=DEVICE)
rows = [(FEWEST + MOST) // 2 if MENDED else count for count in range(FEWEST, MOST)]
batches = [(inputs[:count], labels[:count]) for count in rows]
if LARGE:  # three of the largest activations, and what cuBLAS takes for itself
    room = torch.cuda.memory_reserved() + 3.2 * MOST * WIDTH * 4 + 2**26
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties().total_memory)
train(model, batches, lambda *batch: learn(model, *batch))
