"""Loss and metric of one class per pixel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

IGNORED = 255  # a pixel's class that counts for nothing, as Pascal VOC marks outlines


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Cross entropy: of each image the mean over the pixels that count, and of these the mean over the batch,
    so that a batch in parts, or on several ranks, trains as it does whole.
    """
    each = functional.cross_entropy(model(batch[0]), batch[1], ignore_index=IGNORED, reduction="none")
    counted = (batch[1] != IGNORED).flatten(1).sum(1).clamp(min=1)
    mean: torch.Tensor = (each.flatten(1).sum(1) / counted).mean()
    return mean


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
