"""Clipping of gradients by their norm, as a Job's `on_gradients`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def every_weight(model: nn.Module) -> Iterable[nn.Parameter]:
    """All parameters of a model."""
    return model.parameters()


def clipping(
    norm: float, weights_of: Callable[[Any], Iterable[nn.Parameter]] = every_weight
) -> Callable[[nn.Module], None]:
    """``(model) -> None``: scale the gradients of `weights_of` it so that their norm is at most `norm`."""

    def clip(model: nn.Module) -> None:
        import torch

        torch.nn.utils.clip_grad_norm_(weights_of(model), norm)

    return clip
