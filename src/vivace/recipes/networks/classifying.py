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
    right: Any = 0
    total = 0
    for inputs, labels in batches:
        right = right + (model(inputs).argmax(1) == labels).sum()  # stays on the device meanwhile
        total += len(labels)
    return float(right) / total
