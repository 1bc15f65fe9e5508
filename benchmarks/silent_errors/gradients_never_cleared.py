# expect: different
"""`optimizer.zero_grad()` was forgotten: gradients add up over all steps.

Stack Overflow, question 60335387 (`stackoverflow-60335387` of TrainCheck's evaluation).
"""

import dataclasses

import torch
from _pictures import job


class NeverClears(torch.optim.Adam):
    """Leaves the gradients as they are."""

    def zero_grad(self, set_to_none=True):
        """Do nothing."""


edited = dataclasses.replace(job, optimizer=lambda model: NeverClears(model.parameters(), lr=1e-3))
