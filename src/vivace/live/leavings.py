"""What a call of a model leaves for its script beside gradients and updates, by precision and memory order:
buffers, and tensors that modules of the script's own keep as attributes, that stand in what was given to the
call, and in what came back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import nn

from vivace.tensors.outside import PLAIN, of_library
from vivace.torch_internals.modules import own_tensors

DEPTH = 4  # of containers and objects in each other
MOST = 1000  # entries of each, and things that are looked at
Left = dict[str, tuple[torch.dtype, bool]]  # dtype, and whether it is contiguous, by where it stands


def left_by(root: nn.Module, arguments: object, result: object) -> Left:
    """Of all tensors but the weights that a module's attributes, its call's arguments and its result hold."""
    found: Left = {}
    seen: set[int] = set()
    spaces: list[tuple[str, object]] = [("what it was given", arguments), ("what it returns", result)]
    for name, module in root.named_modules():
        place = f"its part '{name}'" if name else "itself"
        weights, buffers = own_tensors(module)
        spaces.append((place, buffers))
        if not of_library(type(module).__module__):
            kept = {k: v for k, v in vars(module).items() if v is not weights and v is not buffers}
            spaces.append((place, kept))
    for place, space in spaces:
        for path, tensor in _tensors(space, "", DEPTH, seen):
            found[f"{place}{path}"] = tensor.dtype, tensor.layout != torch.strided or tensor.is_contiguous()
    return found


def otherwise(mine: Left, theirs: Left) -> str:
    """What a plan leaves in another precision or memory order than the script does; empty where nothing."""
    for place, (dtype, contiguous) in theirs.items():
        own_dtype, own_contiguous = mine.get(place, (dtype, contiguous))
        if own_dtype != dtype:
            name = str(own_dtype).removeprefix("torch.")
            return f"its model leaves numbers of {name} under it, in {place}"
        if contiguous and not own_contiguous:
            return f"its model leaves a tensor in another memory order under it, in {place}"
    return ""


def _tensors(thing: object, path: str, depth: int, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(thing, torch.Tensor):
        if not isinstance(thing, nn.Parameter):
            yield path, thing
        return
    if id(thing) in seen or not depth or len(seen) > MOST:
        return
    seen.add(id(thing))
    for name, part in islice(_parts(thing), MOST):
        if not isinstance(part, (*PLAIN, type, nn.Module)):
            yield from _tensors(part, f"{path}.{name}", depth - 1, seen)


def _parts(thing: object) -> Iterator[tuple[object, Any]]:
    """Of a container, an object of the script's own or a distribution; other objects keep to themselves."""
    if isinstance(thing, Mapping):
        return iter(thing.items())
    if isinstance(thing, (list, tuple)):
        return iter(enumerate(thing))
    module = type(thing).__module__
    is_open = module.startswith("torch.distributions") or not of_library(module)
    return iter(vars(thing).items() if is_open and hasattr(thing, "__dict__") else ())
