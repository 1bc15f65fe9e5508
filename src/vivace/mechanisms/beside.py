"""What a block reads beside its weights and buffers: attributes of its modules, and objects that it gets.

A counter, a temperature, a state that is carried on, a generator of random numbers: a block that runs once
more must find them as the first time, and leave them as they are by then.
"""

from __future__ import annotations

import contextlib
import copy
import types
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from vivace.tensors.outside import MOST_ENTRIES, MOST_OBJECTS, as_it_is
from vivace.tensors.trees import fields_of, tensors

OF_MODULES = frozenset(vars(nn.Module())) - {"training"}  # weights, buffers, parts and hooks
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_NESTED = (list, tuple, dict, OrderedDict, defaultdict, Counter, deque)
_NOT_OBJECTS = (
    *_PLAIN,
    *(torch.Tensor, nn.Module, torch.optim.Optimizer, Dataset, DataLoader),
    *(types.FunctionType, types.MethodType),
)


class Beside:
    """Attributes as they are now.

    Args:
        spaces: the ``__dict__`` of each module or object.
        without: names that are left alone.
    """

    def __init__(self, spaces: Iterable[dict[str, Any]], without: Collection[str] = ()) -> None:
        self._without = without
        known: dict[int, Any] = {}
        self._then = [(space, self._copied(space, known)) for space in spaces]

    def _copied(self, space: dict[str, Any], known: dict[int, Any]) -> dict[str, Any]:
        return {name: _copy(value, known) for name, value in space.items() if name not in self._without}

    def tensors(self, of: slice = slice(None)) -> Iterator[torch.Tensor]:
        """Those among the attributes of these spaces, also in containers."""
        seen: set[int] = set()
        for _, then in self._then[of]:
            for value in then.values():
                yield from _tensors(value, seen)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Inside, the attributes are as they were; afterwards as they are now."""
        now = [dict(space) for space, _ in self._then]
        known: dict[int, Any] = {}
        try:
            for (space, then), before in zip(self._then, now, strict=True):
                alone = {name: before[name] for name in self._without if name in before}
                _put(space, alone | self._copied(then, known))  # a copy: there may be a third time
            yield
        finally:
            for (space, _), before in zip(self._then, now, strict=True):
                _put(space, before)


def objects(things: Iterable[object], wanted: Callable[[object], bool] = lambda _: True) -> Iterator[Any]:
    """Each object among these, also inside of others, that has a ``__dict__`` and is `wanted`; what is not is
    not looked into. No modules, functions or data sets, and `MOST_OBJECTS` at most.
    """
    waiting, seen, count = list(things), set[int](), 0
    while waiting and count < MOST_OBJECTS and len(seen) < MOST_ENTRIES:
        thing: Any = waiting.pop()
        if isinstance(thing, _NOT_OBJECTS) or id(thing) in seen:
            continue
        if isinstance(thing, (list, tuple, deque)):
            inner: Iterable[Any] = thing
        elif isinstance(thing, (dict, UserDict)):
            inner = thing.values()
        elif isinstance(space := getattr(thing, "__dict__", None), dict) and wanted(thing):
            yield thing
            seen.add(id(thing))
            inner, count = space.values(), count + 1
        else:
            continue
        if more := [each for each in inner if not isinstance(each, _NOT_OBJECTS)]:
            seen.add(id(thing))
            waiting += more[:MOST_ENTRIES]


def _copy(thing: Any, known: dict[int, Any]) -> Any:
    """As `as_it_is` makes it; what is met again, also inside of itself, is the same copy again."""
    if isinstance(thing, _PLAIN):
        return thing
    if id(thing) in known:
        return known[id(thing)]
    if type(thing) not in _NESTED or len(thing) > MOST_ENTRIES:
        found = as_it_is(thing, _without_graph)
    elif isinstance(thing, tuple):
        found = tuple(_copy(value, known) for value in thing)
    else:
        found = known[id(thing)] = copy.copy(thing)  # with what makes the missing entries of a defaultdict
        for key, value in thing.items() if isinstance(thing, dict) else enumerate(thing):
            found[key] = _copy(value, known)
    known[id(thing)] = found
    return found


def _tensors(thing: object, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(thing, _PLAIN) or id(thing) in seen:
        return
    seen.add(id(thing))
    inner: Iterable[Any]
    if isinstance(thing, (list, tuple, deque)):
        inner = thing
    elif isinstance(thing, dict):
        inner = thing.values()
    elif (names := fields_of(thing)) is not None:
        inner = (getattr(thing, name) for name in names)
    else:
        yield from tensors(thing)
        return
    for each in inner:
        if not isinstance(each, _PLAIN):
            yield from _tensors(each, seen)


def _put(space: dict[str, Any], values: dict[str, Any]) -> None:
    for name in space.keys() - values.keys():
        del space[name]
    space.update(values)


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """With it the graph of the step before would be kept, which may keep the one before that, and so on."""
    return tensor if tensor.grad_fn is None else tensor.detach().requires_grad_()
