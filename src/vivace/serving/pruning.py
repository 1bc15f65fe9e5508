"""Structured pruning: the model of a run with fewer channels, as a job that begins with what is left of it.

Which channels belong together is found by torch-pruning (DepGraph, https://arxiv.org/abs/2301.12900); those
with the smallest weights go. Widths stay multiples of 32: kernels pad what lies between.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vivace.errors import JobError, Refused
from vivace.job import Job, load
from vivace.serving.calls import Flat, first_call
from vivace.serving.trained import load_trained

if TYPE_CHECKING:
    from collections.abc import Sequence

MULTIPLE = 32
ROWS = 2  # samples that the model is traced with
LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
MOST_HEADS = 8  # layers that end in outputs of their own


def pruned(job: Job | str, *, run: str | os.PathLike[str], keep: float) -> Job:
    """The job with a narrower model, which begins with the weights of a run that are left.

    Args:
        job: a Job, or its reference; it needs a metric, by whose calls the model is traced.
        run: the folder of a `vivace.train` of it.
        keep: the share of each layer's channels that stays, rounded down to a multiple of 32; layers of fewer
            channels, and those that end in an output, keep all of them.

    Its `model` raises Refused where nothing can be removed, or torch-pruning cannot follow the model.
    """
    whole = load(job) if isinstance(job, str) else job
    if not 0 < keep < 1:
        raise JobError(f"keep is {keep}; it must be a share between 0 and 1")
    return dataclasses.replace(whole, model=lambda: narrowed(whole, Path(run), keep))


def narrowed(job: Job, run: Path, keep: float) -> nn.Module:
    """The trained model with fewer channels, ready to be trained further, but for what the job's model keeps
    frozen; equal from process to process.
    """
    model, _ = load_trained(job, run)
    first = first_call(job, model)
    inputs = [tensor[:ROWS] if tensor.dim() else tensor for tensor in first.inputs]
    trains = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    model.requires_grad_(True)  # which torch-pruning follows
    whole = Flat(model, first.given, writes=first.writes).eval()
    shapes = _shapes(whole, inputs)
    order = _called(whole, inputs)
    for heads in range(min(MOST_HEADS, len(order)) + 1):
        found = _cut(whole, inputs, keep, set(order[len(order) - heads :]))
        if _shapes(found, inputs) == shapes:
            break
    else:
        raise Refused("the model's outputs keep their shapes only where no layer is pruned")
    if sum(p.numel() for p in found.parameters()) == sum(p.numel() for p in whole.parameters()):
        raise Refused(f"no layer has {MULTIPLE} channels to spare")
    parted = next((names for names in _ties(whole) if names not in _ties(found)), None)
    if parted:
        raise Refused(f"'{parted[0]}' and '{parted[1]}' are one tensor, which torch-pruning makes two of")
    for name, parameter in found.model.named_parameters():
        parameter.requires_grad_(trains[name])
    return found.model.train()


def _cut(whole: Flat, inputs: Sequence[torch.Tensor], keep: float, heads: set[str]) -> Flat:
    """A copy with fewer channels in all layers but those that are named, or too narrow."""
    import torch_pruning

    model = copy.deepcopy(whole)
    spared = [
        module
        for name, module in model.named_modules()
        if isinstance(module, LAYERS) and (name in heads or keep * _width(module) < MULTIPLE)
    ]
    groups: dict[str, dict[Any, int]] = {"in_channel_groups": {}, "out_channel_groups": {}}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of parameters of no layer: shapes are compared after
            torch_pruning.pruner.BasePruner(
                model,
                list(inputs),
                torch_pruning.importance.GroupMagnitudeImportance(),
                pruning_ratio=1.0 - keep,
                round_to=MULTIPLE,
                ignored_layers=spared,
                **groups,  # else it keeps those of the model before
            ).step()
    except Exception as error:  # whatever it meets in a person's forward
        raise Refused(f"torch-pruning cannot follow the model: {type(error).__name__}: {error}") from error
    return model


def _ties(flat: Flat) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in flat.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def _width(module: nn.Module) -> int:
    width: Any = module.out_features if isinstance(module, nn.Linear) else module.out_channels
    return int(width)


def _shapes(model: Flat, inputs: Sequence[torch.Tensor]) -> list[tuple[int, ...]] | None:
    """Of all outputs; None where the model does not run any more."""
    try:
        with torch.no_grad():
            return [tuple(tensor.shape) for tensor in model(*inputs)]
    except Exception:  # a person's forward, on widths that it does not expect
        return None


def _called(model: Flat, inputs: Sequence[torch.Tensor]) -> list[str]:
    """The names of layers in the order in which they are called."""
    found: list[str] = []
    handles = [
        module.register_forward_hook(lambda *_, name=name: found.append(name))
        for name, module in model.named_modules()
        if isinstance(module, LAYERS)
    ]
    try:
        with torch.no_grad():
            model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    return list(dict.fromkeys(found))
