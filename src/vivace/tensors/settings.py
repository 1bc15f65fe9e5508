"""Settings of the whole process that sessions change: each comes back, in whatever order sessions close."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any, TypeVar

Value = TypeVar("Value")


@dataclasses.dataclass
class _Held:
    before: Any
    write: Callable[[Any], None]


_held: dict[Hashable, list[_Held]] = {}


def hold(
    name: Hashable, read: Callable[[], Value], write: Callable[[Value], None], value: Value
) -> Callable[[], None]:
    """Set a setting to `value` and return what lets go of it.

    The one that came last has its value until it lets go. One that lets go earlier changes nothing, and
    what it found there goes to the one that came after it.

    Args:
        name: of the setting, which is the process's.
        read, write: get its value now, and set it.
        value: what `write` is given.
    """
    mine = _Held(read(), write)
    write(value)
    _held.setdefault(name, []).append(mine)
    return partial(_let_go, name, mine)


@contextlib.contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Inside, torch computes on so many threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _let_go(name: Hashable, mine: _Held) -> None:
    holders = _held[name]
    place = next(i for i, holder in enumerate(holders) if holder is mine)
    holders.pop(place)
    if place < len(holders):
        holders[place].before = mine.before
        return
    mine.write(mine.before)
    if not holders:
        del _held[name]
