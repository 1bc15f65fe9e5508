# expect: different
"""Fine-tuning in which the first stage, meant to be frozen, is trained: it was frozen too late.

MMPretrain's issue 702 (`mmpretrain-702` of TrainCheck's evaluation).
"""

import dataclasses

from _pictures import job, model

unfrozen = job


def frozen():
    """The network with a first stage that does not learn."""
    network = model()
    network[:3].requires_grad_(False)
    return network


job = dataclasses.replace(unfrozen, model=frozen)
edited = unfrozen
