# expect: same
"""The edit writes the cross entropy out, in another order of its sums."""

import dataclasses

from _table import job


def loss(model, batch):
    """The mean cross entropy."""
    scores = model(batch[0])
    right = scores.gather(1, batch[1][:, None])[:, 0]
    return (scores.logsumexp(1) - right).mean()


edited = dataclasses.replace(job, loss=loss)
