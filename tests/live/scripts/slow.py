"""A part of a model that waits unless it runs under autocast: what is faster does not hang on a clock.

So autocast is tried on any processor, with units for it or without.

With IMPATIENT=1 a search does not wait until the run is long enough for it, of which test_cost.py is.
"""

import os
import sys
import time

import torch
from torch import nn

spending = sys.modules.get("vivace.live.spending")
if spending is not None:
    from vivace.live import candidates

    candidates.UNITS |= {"avx2", "neon"}
if spending is not None and os.environ.get("IMPATIENT"):
    spending.PATIENCE = 1.0
    spending.START_SECONDS = 20.0


class Slow(nn.Module):
    def __init__(self, seconds=0.05):
        super().__init__()
        self.seconds = seconds

    def forward(self, inputs):
        if self.training and not torch.is_autocast_enabled("cpu"):
            time.sleep(self.seconds)
        return inputs
