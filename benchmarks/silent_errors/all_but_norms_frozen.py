# expect: different
"""Transfer learning in which the filter of names freezes every layer but the norms.

PyTorch's forum, topic 84911 (`pytorch-forum-84911` of TrainCheck's evaluation).
"""

import dataclasses

from _pictures import job, model
from torch import nn


def frozen():
    """The network, of which only BatchNorm learns."""
    network = model()
    for module in network:
        if not isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(False)
    return network


edited = dataclasses.replace(job, model=frozen)
