"""What a block reads beside its weights and buffers: attributes of its modules, and objects that it gets.

A counter, a temperature, a state that is carried on, a generator of random numbers: a block that runs once
more must find them as the first time, and leave them as they are by then.
"""

from __future__ import annotations

import contextlib
import types
from collections import UserDict
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from vivace.tensors.outside import MOST_ENTRIES, MOST_OBJECTS, as_it_is
from vivace.tensors.trees import tensors

OF_MODULES = frozenset(vars(nn.Module())) - {"training"}  # weights, buffers, parts and hooks
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class Beside:
    """Attributes as they are now.

    Args:
        spaces: the ``__dict__`` of each module or object.
        without: names that are left alone.
    """

    def __init__(self, spaces: Iterable[dict[str, Any]], without: Collection[str] = ()) -> None:
        self._without = without
        self._then = [(space, self._copied(space)) for space in spaces]

    def _copied(self, space: dict[str, Any]) -> dict[str, Any]:
        return {
            name: value if isinstance(value, _PLAIN) else as_it_is(value, _without_graph)
            for name, value in space.items()
            if name not in self._without
        }

    def tensors(self) -> Iterator[torch.Tensor]:
        """Those among the attributes, also in containers."""
        for _, then in self._then:
            for value in then.values():
                if not isinstance(value, _PLAIN):
                    yield from tensors(value)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Inside, the attributes are as they were; afterwards as they are now."""
        now = [dict(space) for space, _ in self._then]
        try:
            for (space, then), before in zip(self._then, now, strict=True):
                alone = {name: before[name] for name in self._without if name in before}
                _put(space, alone | self._copied(then))  # a copy: there may be a third time
            yield
        finally:
            for (space, _), before in zip(self._then, now, strict=True):
                _put(space, before)


def objects(thing: object, seen: set[int]) -> Iterator[Any]:
    """Each object in a tree, also inside of others, that has a ``__dict__`` and is no module or function."""
    none = (*_PLAIN, torch.Tensor, nn.Module, types.FunctionType, types.MethodType)
    if isinstance(thing, none) or id(thing) in seen or len(seen) > MOST_OBJECTS:
        return
    seen.add(id(thing))
    inner: Iterable[Any]
    if isinstance(thing, (list, tuple)):
        inner = thing
    elif isinstance(thing, (dict, UserDict)):
        inner = thing.values()
    else:
        space = getattr(thing, "__dict__", None)
        if not isinstance(space, dict):
            return
        yield thing
        inner = space.values()
    for each in list(inner)[:MOST_ENTRIES]:
        yield from objects(each, seen)


def _put(space: dict[str, Any], values: dict[str, Any]) -> None:
    for name in space.keys() - values.keys():
        del space[name]
    space.update(values)


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """With it the graph of the step before would be kept, which may keep the one before that, and so on."""
    return tensor if tensor.grad_fn is None else tensor.detach().requires_grad_()
