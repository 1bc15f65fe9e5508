"""Sizes that change in every step, in so little memory that the allocator has to give back and start anew."""

import random

import torch
from common import DEVICE, LARGE, MENDED, learn, train
from torch import nn

WIDTH = 2**14 if LARGE else 64
random.seed(0)
model = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)).to(DEVICE)
rows = [2048 if MENDED else random.randrange(1024, 4096) for _ in range(64)]
batches = [(torch.randn(n, 64, device=DEVICE), torch.randint(10, (n,), device=DEVICE)) for n in rows]
if LARGE:  # three of the largest activations, and what a context takes
    room = 3.2 * 4096 * WIDTH * 4 + torch.cuda.memory_allocated()
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties().total_memory)
train(model, batches, lambda *batch: learn(model, *batch))
