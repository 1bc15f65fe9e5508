"""The reverse question: what could be trained on this card? Imports no torch."""

from __future__ import annotations

import dataclasses
from typing import Any

from vivace.advising.catalogue import Gpu
from vivace.advising.predict import Prediction, Predictor, lacks, precision_on
from vivace.advising.source import ITEM_BYTES, counted_model
from vivace.advising.way import usual_order
from vivace.errors import InputError
from vivace.machine import CONTEXT_BYTES

# Well-known models, and what a pass over their usual data is.
EXAMPLES = (
    ("torchvision:resnet18@224", 1_281_167, "ImageNet"),
    ("torchvision:resnet50@224", 1_281_167, "ImageNet"),
    ("timm:efficientnet_b0@224", 1_281_167, "ImageNet"),
    ("timm:efficientnet_b4@380", 1_281_167, "ImageNet"),
    ("timm:convnext_tiny@224", 1_281_167, "ImageNet"),
    ("timm:convnext_large@224", 1_281_167, "ImageNet"),
    ("fused:vit_small_patch16_224@224", 1_281_167, "ImageNet"),
    ("fused:vit_base_patch16_224@224", 1_281_167, "ImageNet"),
    ("fused:vit_large_patch16_224@224", 1_281_167, "ImageNet"),
    ("timm:swin_base_patch4_window7_224@224", 1_281_167, "ImageNet"),
    ("own:ssd_resnet50", 118_287, "COCO"),
    ("fused:bert_base_squad", 88_641, "SQuAD"),
    ("fused:bert_large_squad", 88_641, "SQuAD"),
    ("fused:gpt2_large", 97_656, "100 M tokens of 1,024"),
    ("fused:gpt3_xl", 48_828, "100 M tokens of 2,048"),
    ("fused:gpt3_27", 48_828, "100 M tokens of 2,048"),
    ("own:unet3d", 168, "KiTS19"),
)
LARGEST_BATCH = 512


@dataclasses.dataclass(frozen=True)
class Trainable:
    """A known model on the card: the largest power-of-two batch that fits, and its speed there."""

    model: str
    data: str
    batch_size: int
    prediction: Prediction | None
    epoch_hours: float | None

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types."""
        p = self.prediction
        speed = (
            None
            if p is None
            else {
                "estimate": p.samples_per_second,
                "low": p.batch_size / p.high,
                "high": p.batch_size / p.low,
            }
        )
        return {
            "model": self.model,
            "data": self.data,
            "fits": p is not None,
            "batch_size": self.batch_size or None,
            "samples_per_second": speed,
            "epoch_hours": self.epoch_hours,
            "limit": p.limit if p else None,
        }


def trained_in(gpu: Gpu, precision: str) -> str:
    """The precision in which a card trains these models where `precision` is asked for. Raises InputError
    where there is none such, or the card has it not."""
    if precision == "profiled":
        raise InputError("--precision profiled is that of a profile, and --on has none: name another")
    found = precision_on(gpu, "amp" if precision == "auto" else precision)
    if lacks(gpu, found):
        raise InputError(f"{gpu.name} has no {lacks(gpu, found)}: --precision amp is what it trains in")
    return found


def largest_model(gpu: Gpu, precision: str = "amp") -> float:
    """Parameters whose weights, gradients and AdamW state alone fill the card; with copies in half precision
    where that is mixed."""
    size = ITEM_BYTES.get(precision, 2)
    a_parameter = 4 * max(size, 4) + (2 if size == 2 else 0)
    return (gpu.usable_bytes - CONTEXT_BYTES) / a_parameter


def trainable(gpu: Gpu, precision: str = "amp") -> list[Trainable]:
    """What of the well-known models the card can train, and how fast. Raises InputError for a bad
    precision."""
    found = []
    for key, samples, data in EXAMPLES:
        best: Prediction | None = None
        batch = LARGEST_BATCH
        while batch >= 1 and best is None:
            subject = counted_model(key, batch)
            if subject is None:
                break
            prediction = Predictor(subject, precision, usual_order(subject, precision)).one(gpu)
            best = prediction if prediction.fits and not prediction.how else None
            batch //= 2
        hours = None if best is None else samples / best.samples_per_second / 3600
        name = key.partition(":")[2].partition("@")[0]
        found.append(Trainable(name, data, best.batch_size if best else 0, best, hours))
    if not found:
        raise InputError("the table of counted models is empty")
    return found
