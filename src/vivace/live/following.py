"""Copies of a model whose functions use the copy's parts."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

from torch import nn

Things = TypeVar("Things")


def copied(things: Things, root: nn.Module) -> Things:
    """A deep copy of what `root` is part of, in which functions that its modules hold use the copies of what
    they use.

    `copy.deepcopy` hands functions on as they are: after ``self.shortcut = lambda x: other(x)`` a copy of the
    model would train the original's ``other``. Followed are the variables around a function and its defaults
    where they are modules, parameters or buffers of `root` themselves, or methods of such modules.
    """
    parts = {id(part) for part in (*root.modules(), *root.parameters(), *root.buffers())}
    memo: dict[int, Any] = {}
    cells: dict[int, tuple[CellType, CellType]] = {}
    functions: list[tuple[FunctionType, FunctionType]] = []
    for module in root.modules():
        for value in vars(module).values():
            if isinstance(value, FunctionType) and parts.intersection(id(_own(one)) for one in _used(value)):
                around = (cells.setdefault(id(c), (c, CellType()))[1] for c in value.__closure__ or ())
                made = FunctionType(
                    value.__code__, value.__globals__, value.__name__, None, tuple(around) or None
                )
                made.__kwdefaults__, made.__qualname__ = value.__kwdefaults__, value.__qualname__
                vars(made).update(vars(value))
                memo[id(value)] = made
                functions.append((value, made))
    found = copy.deepcopy(things, memo)

    def following(used: Any) -> Any:
        own = _own(used)
        other = memo.get(id(own), own) if id(own) in parts else own
        return other if own is used else MethodType(used.__func__, other)

    for before, after in cells.values():
        for content in _content(before):
            after.cell_contents = following(content)
    for function, made in functions:
        if function.__defaults__ is not None:
            made.__defaults__ = tuple(map(following, function.__defaults__))
    return found


def _used(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        yield from _content(cell)
    yield from function.__defaults__ or ()


def _own(used: object) -> object:
    """The object whose method it is; else itself."""
    return used.__self__ if isinstance(used, MethodType) else used


def _content(cell: CellType) -> list[Any]:
    """What a variable holds; nothing where it has no value yet."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []
