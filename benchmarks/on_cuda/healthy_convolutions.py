"""Large convolutions in bf16 on batches that lie on the device."""

import torch
from common import DEVICE, LARGE, convolutions, learn, ready, train

model = convolutions()


def step(optimizer, inputs, labels):
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        learn(model, optimizer, inputs, labels)


train(model, ready((128, 3, 56, 56) if LARGE else (4, 3, 16, 16)), step)
