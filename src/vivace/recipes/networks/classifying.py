"""Loss and metric of one class per sample."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Cross entropy, the mean over the batch."""
    return functional.cross_entropy(model(batch[0]), batch[1])


def accuracy(model: nn.Module, batches: Iterable[Any]) -> float:
    """The share of samples whose class is found."""
    from torchmetrics.classification import MulticlassAccuracy

    found = None
    for inputs, labels in batches:
        logits = model(inputs)
        if found is None:
            found = MulticlassAccuracy(logits.shape[1], average="micro").to(logits.device)
        found.update(logits, labels)
    assert found is not None
    return float(found.compute())
