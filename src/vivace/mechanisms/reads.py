"""What a forward function reads beside tensors: numbers, texts and switches, for constants in a trace of it.

Its module's own attributes are seen at once. Others it finds by a name in its code: in a container or an
object that it holds, in a part of the module, among the variables of the file in which it stands.
"""

from __future__ import annotations

import types
from collections import deque
from typing import Any

import torch
from torch import nn

from vivace.tensors.outside import MOST_ENTRIES, PLAIN, globals_of, names_of, of_library

DEPTH = 4  # of containers and objects in each other
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_OTHER = (torch.Tensor, nn.Module, type, types.FunctionType, types.MethodType)


class Reads:
    """The places where a module's forward, and the functions that it calls, find such by name."""

    def __init__(self, owner: nn.Module) -> None:
        self.owner = owner
        self._places: list[tuple[dict[str, Any], str]] | None = None
        self._parts: list[nn.Module] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Reads:
        return Reads(memo.get(id(self.owner), self.owner))

    def now(self) -> tuple[Any, ...]:
        """What lies there; equal as long as nothing has changed."""
        if self._places is None:
            self.names, outside = _named(type(self.owner))
            inner = [part for part in self.owner.modules() if part is not self.owner]
            spaces = [vars(self.owner), *map(vars, inner)]
            found = [(space, name) for space in spaces for name in self.names if name in space]
            found += [(space, name) for space, names in outside for name in sorted(names) if name in space]
            self._places = [(space, name) for space, name in found if _may_change(name, space[name])]
            self._parts = [self.owner, *(part for part in inner if isinstance(part, _CONTAINERS))]
        values = (_frozen(space.get(name), self.names) for space, name in self._places)
        return (*(tuple(map(id, part.children())) for part in self._parts), *values)


def _named(kind: type[nn.Module]) -> tuple[tuple[str, ...], list[tuple[dict[str, Any], set[str]]]]:
    """The names in the code of a class's forward and of what it calls, and those of the files' variables."""
    waiting, seen = _methods(kind, "forward"), set[types.CodeType]()
    names, spaces = set[str](), dict[int, tuple[dict[str, Any], set[str]]]()
    while waiting:
        function = waiting.pop()
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        outside = spaces.setdefault(id(function.__globals__), (function.__globals__, set()))
        outside[1].update(globals_of(function.__code__))
        found = set(names_of(function.__code__))
        names |= found
        waiting += [method for name in found for method in _methods(kind, name)]
        beside = [function.__globals__.get(name) for name in found]
        waiting += [f for f in beside if isinstance(f, types.FunctionType) and not of_library(f.__module__)]
    return tuple(sorted(names)), list(spaces.values())


def _methods(kind: type[nn.Module], name: str) -> list[types.FunctionType]:
    found = [vars(base).get(name) for base in kind.__mro__ if not issubclass(nn.Module, base)]
    plain = [getattr(one, "fget", None) or getattr(one, "__func__", one) for one in found]
    return [one for one in plain if isinstance(one, types.FunctionType)]


def _may_change(name: str, value: object) -> bool:
    """May it be another number later? A mode is asked for of the module itself, and known."""
    of_others = isinstance(value, types.ModuleType) and of_library(value.__name__)
    return name != "training" and not of_others and not isinstance(value, _OTHER)


def _frozen(value: Any, names: tuple[str, ...], depth: int = 0) -> Any:
    """The numbers, texts and switches in a value, to be compared with those of later."""
    if isinstance(value, PLAIN):
        return value
    if depth > DEPTH or isinstance(value, _OTHER):
        return None
    if isinstance(value, dict):
        value = [part for pair in value.items() for part in pair]
    if isinstance(value, (list, tuple, set, deque)):
        few = value if len(value) <= MOST_ENTRIES else ()
        return tuple(_frozen(part, names, depth + 1) for part in few)
    space = getattr(value, "__dict__", None)
    if not isinstance(space, dict):
        return None
    return tuple(_frozen(space[name], names, depth + 1) for name in names if name in space)
