# expect: different
"""One tensor in a hundred arrives as zeros, as on cards whose direct exchange was broken.

PyTorch's issues 84803 and 96600, Baichuan2's issue 86 (TrainCheck's evaluation injects the same loss).
"""

import dataclasses
import itertools

import torch
from _pictures import job, loss


def lossy():
    """The loss of a batch, whose pictures are lost each hundredth time in training."""
    steps = itertools.count(1)

    def of_batch(model, batch):
        lost = torch.is_grad_enabled() and next(steps) % 100 == 0
        return loss(model, [torch.zeros_like(batch[0]) if lost else batch[0], batch[1]])

    return of_batch


edited = dataclasses.replace(job, loss=lossy())
