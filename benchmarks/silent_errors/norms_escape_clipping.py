# expect: different
"""Gradient clipping leaves the norms' gradients as they are, so weights that were copies drift apart.

DeepSpeed's pull request 1801, met in the training of BLOOM (`deepspeed-1801` of TrainCheck's evaluation, on
two ranks; here what one rank does).
"""

import dataclasses

from _words import job
from torch import nn


def clip(model):
    """Scale all gradients but the norms' to the norm of all of them."""
    others = [p for name, p in model.named_parameters() if not name.startswith("norms")]
    whole = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    nn.utils.clip_grads_with_norm_(others, 0.5, whole)


edited = dataclasses.replace(job, on_gradients=clip)
