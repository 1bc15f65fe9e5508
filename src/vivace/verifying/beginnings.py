"""Do two jobs begin alike? Initial weights and buffers, as equal bits or as draws from one distribution."""

from __future__ import annotations

import math
from typing import Any

import torch

from vivace.job import Job
from vivace.session.opening import call, models_of, seed_everything
from vivace.tensors.modules import named_buffers, named_parameters
from vivace.verifying.displacement import Tensors, flat
from vivace.verifying.figures import Measure, Quantity
from vivace.verifying.judgement import figure_of

SEEDS = 8  # builds of the model, where one is not enough
MOST_ELEMENTS = 4096  # of each tensor that are looked at, of one build
# Two-sample Kolmogorov-Smirnov, in units of sqrt(2 / n): larger by chance once in a million pairs.
LIMIT = 2.7
ROUNDING = 1e-5  # relative


def draw(job: Job) -> Tensors:
    """Elements of every parameter and buffer of the model, as built under several seeds."""
    found: dict[str, list[torch.Tensor]] = {}
    for seed in range(SEEDS):
        seed_everything(seed)
        models = models_of(job, call(job, "model"))
        for name, tensor in [*named_parameters(models), *named_buffers(models)]:
            numbers = flat(tensor.detach())
            found.setdefault(name, []).append(numbers[:: 1 + len(numbers) // MOST_ELEMENTS].cpu())
    return {name: torch.cat(parts) for name, parts in found.items()}


def checks_of(mine: Tensors, theirs: Tensors) -> list[dict[str, Any]]:
    """A figure for each tensor: the largest distance of the two distributions."""
    return [_check(name, mine[name], values) for name, values in theirs.items() if values.numel()]


def _check(name: str, mine: torch.Tensor, theirs: torch.Tensor) -> dict[str, Any]:
    constant = bool((theirs == theirs[0]).all())
    if torch.allclose(mine, theirs, rtol=ROUNDING, atol=0.0, equal_nan=True):
        distance = 0.0  # computed, not drawn
    else:
        distance = 1.0 if constant else _distance(mine, theirs)
    envelope = 1e-6 if constant else math.sqrt(2.0 / len(theirs))
    score, measure = distance / envelope, Measure(Quantity.INITIAL, name)
    return figure_of(measure, None, distance, envelope, score, LIMIT) | {"step": 0}


def _distance(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference of the two empirical distribution functions."""
    points = torch.cat([mine, theirs]).sort().values
    below = [torch.searchsorted(v.sort().values, points, right=True) / len(v) for v in (mine, theirs)]
    return float((below[0] - below[1]).abs().max())
