"""Clipping of gradients by their norm, as a Job's `on_gradients`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def clipping(norm: float) -> Callable[[nn.Module], None]:
    """``(model) -> None``: scale the gradients so that their norm is at most `norm`."""

    def clip(model: nn.Module) -> None:
        import torch

        torch.nn.utils.clip_grad_norm_(model.parameters(), norm)

    return clip
