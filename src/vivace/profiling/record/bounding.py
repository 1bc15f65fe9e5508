"""Experiments on what bounds a step: a copy with twice the batch, and a copy of the update in fused form."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vivace.profiling.record.shadow import Allowance, Shadow, compare
from vivace.tensors.trees import map_tensors, tensors

FEW_SECONDS = 100e-6  # a kernel, on average: longer ones are bound by their work
LARGE_SHARE = 0.2  # of the step
MOST_BYTES = 2**30  # that one batch keeps for its backward pass


def run(
    shadow: Shadow | None,
    optimizers: Sequence[torch.optim.Optimizer],
    document: dict[str, Any],
    allowance: Allowance,
) -> None:
    """Those that the step calls for; results stand under ``experiments``, as ratios of neighbouring blocks.
    Without a `shadow` those of the update alone.

    ``double_batch``: seconds of one batch over seconds of two. ``fused``: of the update as it is, over fused.
    """
    done = document.setdefault("experiments", {})
    if shadow is not None and _has_short_kernels(document) and not allowance.is_spent:
        other = doubled(shadow, document.get("rows"))
        if other is not None:
            done["double_batch"] = compare(shadow.runner(), other.runner(), allowance)
    if _updates_long(document) and not allowance.is_spent:
        for optimizer in optimizers:
            if "fused" in optimizer.defaults and not optimizer.defaults["fused"]:
                done["fused"] = compare(
                    updater(optimizer), updater(optimizer, foreach=None, fused=True), allowance
                )
                return


def is_wanted(document: dict[str, Any]) -> bool:
    """Does any of them say something about this step?"""
    return _has_short_kernels(document) or _updates_long(document)


def _has_short_kernels(document: dict[str, Any]) -> bool:
    kernels = max(document.get("kernels") or 0, 1)
    small = (document.get("activation_bytes") or 0) < MOST_BYTES
    return small and document["step_seconds"] < FEW_SECONDS * kernels


def _updates_long(document: dict[str, Any]) -> bool:
    return bool(document["seconds"]["update"] > LARGE_SHARE * document["step_seconds"])


def doubled(shadow: Shadow, num_samples: int | None = None) -> Shadow | None:
    """A shadow whose arguments hold every sample twice, along the first dimension, or the second where that
    one has as many as there are samples. None where they have no such dimension in common.
    """
    call = shadow.arguments, shadow.keywords
    shapes = [tuple(tensor.shape) for tensor in tensors(call)]
    if not all(shapes) or len({shape[0] for shape in shapes}) != 1:
        return None
    over_time = num_samples and all(shape[0] != num_samples in shape[1:2] for shape in shapes)
    dimension = 1 if over_time else 0
    other = copy.copy(shadow)
    other.arguments, other.keywords = map_tensors(call, lambda t: torch.cat([t, t], dimension))
    return other


def updater(optimizer: torch.optim.Optimizer, **settings: object) -> Callable[[], None]:
    """The update of a copy of an optimizer's weights and settings, with some settings replaced."""
    groups = []
    for group in optimizer.param_groups:
        weights = [p.detach().clone().requires_grad_() for p in group["params"] if p.grad is not None]
        for weight in weights:
            weight.grad = torch.full_like(weight, 1e-6)
        rest = {key: value for key, value in group.items() if key != "params"}
        groups.append({**rest, **settings, "params": weights})
    other = type(optimizer)(groups, **_arguments(optimizer, settings))
    step = getattr(type(other).step, "__wrapped__", type(other).step)  # without the hooks of every optimizer
    return lambda: step(other)


def _arguments(optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> dict[str, Any]:
    """What the optimizer was made with, as far as its class takes it."""
    import inspect

    known = inspect.signature(type(optimizer).__init__).parameters
    return {key: value for key, value in {**optimizer.defaults, **settings}.items() if key in known}
