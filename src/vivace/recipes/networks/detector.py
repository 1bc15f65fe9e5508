"""A small one-level FCOS (Tian et al., 2019, arXiv:1904.01355): each place of a grid names a class and a
box.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from vivace.recipes.sources import needing

with needing():
    from torchvision.ops import batched_nms, generalized_box_iou_loss, sigmoid_focal_loss

STRIDE = 8  # pixels between places
CENTER = 1.0  # strides around a box's middle within which a place answers for it
LIKELY = 0.05  # below this probability a box is not told
OVERLAPPING = 0.5  # intersection over union from which the weaker of two boxes is dropped
MOST_TOLD = 20  # boxes of an image
PRIOR = 4.6  # minus the logit of a class at the start: 1 %, as the focal loss needs


class Unit(nn.Module):
    """A residual unit of two 3x3 convolutions, the first with a stride."""

    def __init__(self, num_inputs: int, num_outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(num_inputs, num_outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(num_outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(num_outputs, num_outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(num_outputs),
        )
        self.way: nn.Module = nn.Identity()
        if stride != 1 or num_inputs != num_outputs:
            self.way = nn.Conv2d(num_inputs, num_outputs, 1, stride, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The feature map behind the unit, smaller by its stride."""
        return functional.relu(self.body(hidden) + self.way(hidden))


class Detector(nn.Module):
    """Images (batch, 3, height, width) -> logits (batch, places, classes) and boxes (batch, places, 4) in
    pixels.
    """

    def __init__(self, num_classes: int, width: int, depth: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, width, 3, 2, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        ]
        channels = width
        for level, stride in enumerate((2, 2, 1)):
            wider = width * 2 ** (level + 1)
            layers.append(Unit(channels, wider, stride))
            layers += [Unit(wider, wider, 1) for _ in range(depth - 1)]
            channels = wider
        self.body = nn.Sequential(*layers)
        self.classes = self.branch(channels, num_classes)
        self.sides = self.branch(channels, 4)
        nn.init.constant_(self.classes[-1].bias, -PRIOR)  # type: ignore[arg-type]

    @staticmethod
    def branch(channels: int, num_outputs: int) -> nn.Sequential:
        """A head with group normalization."""
        return nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.GroupNorm(8, channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, num_outputs, 3, padding=1),
        )

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits, and boxes as x1, y1, x2, y2."""
        hidden = self.body(images)
        logits = self.classes(hidden).flatten(2).transpose(1, 2)
        sides = functional.softplus(self.sides(hidden)).flatten(2).transpose(1, 2) * (2 * STRIDE)
        here = places(hidden)
        return logits, torch.cat([here - sides[..., :2], here + sides[..., 2:]], dim=-1)


def places(hidden: torch.Tensor) -> torch.Tensor:
    """The grid's middles in pixels, row by row: (places, 2) as x and y."""
    rows, columns = (
        (torch.arange(length, device=hidden.device) + 0.5) * STRIDE for length in hidden.shape[-2:]
    )
    return torch.stack(torch.meshgrid(columns, rows, indexing="xy"), dim=-1).flatten(0, 1)


def answering(
    here: torch.Tensor, boxes: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which box each place answers for, and whether it does: (batch, places) each; the smallest of several.

    `here` is (places, 2), `boxes` (batch, most, 4), `labels` (batch, most) with -1 for no box.
    """
    x, y = here[None, :, None, 0], here[None, :, None, 1]
    left, top, right, bottom = (boxes[:, None, :, side] for side in range(4))
    inside = (x > left) & (x < right) & (y > top) & (y < bottom) & (labels[:, None, :] >= 0)
    far = torch.maximum((x - (left + right) / 2).abs(), (y - (top + bottom) / 2).abs())
    inside &= far <= CENTER * STRIDE
    area = ((right - left) * (bottom - top)).expand_as(inside).masked_fill(~inside, float("inf"))
    smallest, which = area.min(dim=2)
    return which, smallest.isfinite()


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Focal loss of the classes and generalized IoU loss of the boxes, for each answering place of an
    image; the mean over the batch.
    """
    images, targets, labels = batch
    logits, boxes = model(images)
    rows, columns = (side // STRIDE for side in images.shape[-2:])
    here = places(images.new_empty(rows, columns))
    which, answers = answering(here, targets, labels)
    names = labels.gather(1, which).clamp(min=0)
    wanted = functional.one_hot(names, logits.shape[-1]) * answers.unsqueeze(-1)
    number = answers.sum(1).clamp(min=1)
    of_classes = sigmoid_focal_loss(logits, wanted.to(logits.dtype)).sum((1, 2)) / number
    true = targets.gather(1, which.unsqueeze(-1).expand(-1, -1, 4))
    true = torch.where(answers.unsqueeze(-1), true, boxes.detach())  # a box on itself, which costs nothing
    of_boxes = generalized_box_iou_loss(boxes, true).mul(answers).sum(1) / number
    each: torch.Tensor = of_classes + of_boxes
    return each.mean()


def found(model: nn.Module, images: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Boxes, scores and labels of each image, the likeliest first, none nearly on another of its class."""
    told = []
    logits, boxes = model(images)
    for chances, sides in zip(logits.sigmoid().float(), boxes.float(), strict=True):
        which, labels = (chances > LIKELY).nonzero(as_tuple=True)
        scores = chances[which, labels]
        kept = batched_nms(sides[which], scores, labels, OVERLAPPING)[:MOST_TOLD]
        told.append({"boxes": sides[which][kept], "scores": scores[kept], "labels": labels[kept]})
    return told


def mean_average_precision(
    model: nn.Module, batches: Iterable[Any], found: Callable[..., list[dict[str, torch.Tensor]]] = found
) -> float:
    """COCO's: the mean over classes and over intersections over union from 0.5 to 0.95. `found` says what a
    model sees on images.
    """
    from torchmetrics.detection import MeanAveragePrecision

    score = MeanAveragePrecision(backend="faster_coco_eval")
    for images, targets, labels in batches:
        truth = [
            {"boxes": boxes[names >= 0], "labels": names[names >= 0]}
            for boxes, names in zip(targets, labels, strict=True)
        ]
        score.update(found(model, images), truth)
    return float(score.compute()["map"])
