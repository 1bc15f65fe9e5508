"""A part of a model that waits unless it runs under autocast: what is faster does not hang on a clock."""

import time

import torch
from torch import nn


class Slow(nn.Module):
    def forward(self, inputs):
        if self.training and not torch.is_autocast_enabled("cpu"):
            time.sleep(0.2)
        return inputs
