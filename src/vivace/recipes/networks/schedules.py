"""The learning-rate schedule that most recipes use, and the optimizer beside it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR


def warm_cosine(num_steps: int) -> Callable[[torch.optim.Optimizer], LambdaLR]:
    """A builder: up in a straight line over a tenth of the steps, then down along a cosine to 1 %."""
    warm = max(1, round(0.1 * num_steps))

    def factor(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        done = min(1.0, (step - warm) / max(1, num_steps - warm))
        return 0.01 + 0.99 * 0.5 * (1.0 + math.cos(math.pi * done))

    return lambda optimizer: LambdaLR(optimizer, factor)


def adamw(learning_rate: float, weight_decay: float = 0.05) -> Callable[[nn.Module], torch.optim.AdamW]:
    """A builder of AdamW that decays matrices alone: not biases, norms' weights or single numbers."""

    def build(model: nn.Module) -> torch.optim.AdamW:
        matrices = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
        others = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, weight_decay=weight_decay, betas=(0.9, 0.95))

    return build


def clip(model: nn.Module) -> None:
    """Scale the gradient down to norm one where it is longer."""
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
