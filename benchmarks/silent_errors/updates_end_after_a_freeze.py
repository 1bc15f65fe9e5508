# expect: different
"""A parameter that once had no gradient is never updated again, as a compiler's guard decided.

PyTorch's issue 115607 (`pytorch-115607` of TrainCheck's evaluation). Both trainings leave the first layer out
of every third step; in the edited one it stays out.
"""

import dataclasses
import itertools

import torch
from _pictures import job


class Pausing(torch.optim.Adam):
    """Gives the first weight no gradient in every third step; with `stays`, in no step after that."""

    def __init__(self, parameters, stays):
        super().__init__(parameters, lr=1e-3)
        self.stays, self.steps, self.paused = stays, itertools.count(1), False

    def step(self, closure=None):
        """Update all but what pauses."""
        pauses = next(self.steps) % 3 == 0
        self.paused = pauses or (self.paused and self.stays)
        if self.paused:
            self.param_groups[0]["params"][0].grad = None
        return super().step(closure)


job = dataclasses.replace(job, optimizer=lambda model: Pausing(model.parameters(), False))
edited = dataclasses.replace(job, optimizer=lambda model: Pausing(model.parameters(), True))
