# expect: same
# precision: bfloat16
"""A product stays in fp32 within autocast: slower, and the same model.

Lightning Thunder's issue 725 (`lightning-thunder-725` of TrainCheck's evaluation).
"""

import dataclasses

import _words
import torch


def under_autocast(enabled):
    """A Job whose loss runs its products in bfloat16, or not."""

    def loss(model, batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            scores = model(batch[0])
        return torch.nn.functional.cross_entropy(scores.float(), batch[1])

    return dataclasses.replace(_words.job, loss=loss, on_gradients=None)


edited = under_autocast(False)
job = under_autocast(True)
