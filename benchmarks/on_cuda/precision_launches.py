"""Autocast around kernels that are shorter than their launch: the casts are more of them."""

import torch
from common import DEVICE, MENDED, learn, ready, small, train

model = small()


def step(optimizer, inputs, labels):
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=not MENDED):
        learn(model, optimizer, inputs, labels)


train(model, ready((64, 64)), step)
