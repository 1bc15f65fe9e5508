"""Plain facts about a session that a plan which only rounds has no reason to change; compared as they are."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from vivace.session.session import Session
from vivace.tensors.modules import named_buffers, named_modules, named_parameters
from vivace.tensors.optimizers import IMPLEMENTATION_FLAGS

Facts = dict[str, Any]
# `inplace` cannot change a number that autograd lets through.
NOT_NUMERIC = {"inplace", "training"}
NOT_SETTINGS = {"params", "initial_lr", *IMPLEMENTATION_FLAGS}
# What acts only where another setting is not 0.
BESIDE = {"decoupled_weight_decay": "weight_decay", "dampening": "momentum", "nesterov": "momentum"}
SHAPE = "the shape of "
SAME_NUMBER = 1e-6  # relative; a learning rate on the device is kept in fp32


def facts_of_session(session: Session) -> Facts:
    """Names, shapes and ``requires_grad`` of parameters, names of buffers, and how each is updated."""
    facts: Facts = {}
    names: dict[int, str] = {}
    for name, parameter in named_parameters(session.build.models):
        names[id(parameter)] = name
        facts[f"{SHAPE}{name}"] = tuple(parameter.shape)
        facts[f"requires_grad of {name}"] = parameter.requires_grad
    for name, buffer in named_buffers(session.build.models):
        facts[f"{SHAPE}{name}"] = tuple(buffer.shape)
    for optimizer in session.optimizers:
        for group in optimizer.param_groups:
            for key, value in settings_of(group).items():
                facts |= {f"{key} of {names[id(p)]}": value for p in group["params"] if id(p) in names}
    return facts


def settings_of(group: dict[str, Any]) -> Facts:
    """The numbers of an optimizer's parameter group; of what does not act, zero."""
    plain = {key: _plain(value) for key, value in group.items() if key not in NOT_SETTINGS}
    idle = {key for key, other in BESIDE.items() if plain.get(other) == 0}
    return {k: type(value)() if k in idle else value for k, value in plain.items() if _is_plain(value)}


def facts_of_modules(models: Iterable[nn.Module]) -> Facts:
    """The mode of every module, and the public settings of torch's own ones, by name and class."""
    facts: Facts = {}
    for name, module in named_modules(models):
        where = f"{name} ({type(module).__name__})"
        facts[f"training of {where}"] = module.training
        if not type(module).__module__.startswith("torch.nn."):
            continue
        for key, value in vars(module).items():
            if not key.startswith("_") and key not in NOT_NUMERIC and _is_plain(value):
                facts[f"{key} of {where}"] = value
    return facts


def difference(mine: Facts, theirs: Facts, *, only_shared: bool = False, whose: str = "the job") -> str:
    """The first difference as ``name is a, and b in the job``; empty where there is none.

    Unless `only_shared`, nothing may be gone, and no parameter or buffer may be new. `whose`: the facts of
    `theirs`.
    """
    name = first_difference(mine, theirs, only_shared=only_shared)
    if not name:
        return ""
    if name not in mine:
        return f"{name.removeprefix(SHAPE)} is gone"
    if name not in theirs:
        return f"{name.removeprefix(SHAPE)} is new"
    return f"{name} is {mine[name]}, and {theirs[name]} in {whose}"


def first_difference(mine: Facts, theirs: Facts, *, only_shared: bool) -> str:
    """The name of the first fact that differs (see `difference`), else empty."""
    if not only_shared:
        missing = [name for name in theirs if name not in mine]
        missing += [name for name in mine if name not in theirs and name.startswith(SHAPE)]
        if missing:
            return missing[0]
    shared = (name for name in theirs if name in mine)
    return next((name for name in shared if not _same(mine[name], theirs[name])), "")


def known_to(mine: Facts, theirs: Facts) -> Facts:
    """Those of `theirs` of which anything of `mine` speaks: an optimizer of another class may have no
    `amsgrad` at all. What its updates are shows in the rehearsal and in steps.
    """
    known = {name.partition(" of ")[0] for name in mine}
    return {name: value for name, value in theirs.items() if name.partition(" of ")[0] in known}


def _plain(value: object) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _same(mine: object, theirs: object) -> bool:
    if isinstance(mine, (list, tuple)) and isinstance(theirs, (list, tuple)):
        return len(mine) == len(theirs) and all(map(_same, mine, theirs))
    if isinstance(mine, (int, float)) and isinstance(theirs, (int, float)):
        return math.isclose(mine, theirs, rel_tol=SAME_NUMBER) or mine != mine != theirs != theirs
    return bool(mine == theirs)
