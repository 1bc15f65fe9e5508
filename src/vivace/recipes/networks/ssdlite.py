"""torchvision's SSDlite on MobileNetV3 (Howard et al., 2019, arXiv:1905.02244), from random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

MOST_TOLD = 100  # boxes of an image, as many as COCO's score counts


def build(num_classes: int) -> nn.Module:
    """The network; its class 0 is the background. It resizes images to 320 pixels."""
    from torchvision.models.detection import ssdlite320_mobilenet_v3_large

    made: nn.Module = ssdlite320_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=num_classes + 1, detections_per_img=MOST_TOLD
    )
    return made


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """torchvision's own, the sum of its two parts: a mean over the boxes of the batch. Only in training."""
    images, targets, labels = batch
    told = [
        {"boxes": boxes[names >= 0], "labels": names[names >= 0] + 1}
        for boxes, names in zip(targets, labels, strict=True)
    ]
    parts: dict[str, torch.Tensor] = model(list(images), told)
    return torch.stack(list(parts.values())).sum()


def found(model: nn.Module, images: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Boxes, scores and labels of each image, the background not among them."""
    return [{**one, "labels": one["labels"] - 1} for one in model(list(images))]
