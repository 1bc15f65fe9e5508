"""Loss and metric of one class per pixel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

IGNORED = 255  # a pixel's class that counts for nothing, as Pascal VOC marks outlines


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Cross entropy, the mean over all pixels."""
    return functional.cross_entropy(model(batch[0]), batch[1], ignore_index=IGNORED)


def mean_iou(model: nn.Module, batches: Iterable[Any]) -> float:
    """Intersection over union of each class over all images together, the mean over the classes that are
    there, or are seen there by the model.
    """
    from torchmetrics.classification import MulticlassJaccardIndex

    found = None
    for batch in batches:
        logits = model(batch[0])
        if found is None:
            found = MulticlassJaccardIndex(logits.shape[1], ignore_index=IGNORED).to(logits.device)
        found.update(logits.argmax(1), batch[1])
    assert found is not None
    return float(found.compute())


def confusion(true: torch.Tensor, guess: torch.Tensor, num_classes: int) -> torch.Tensor:
    """How many pixels of each class, a row, are taken for each class, a column."""
    counted = true != IGNORED
    pairs = true[counted] * num_classes + guess[counted]
    return torch.bincount(pairs, minlength=num_classes**2).view(num_classes, num_classes)
