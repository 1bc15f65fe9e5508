"""Objects of a library's or a person's own that hold tensors: graphs, TensorDicts, batches with a `to`.

What moves itself to a device by a `to` is asked to; anything else is done to its tensors one by one. How
such an object keeps them is its own affair: they are found, and put in place of others, as it is pickled.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections import UserDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

_NONE = (torch.Tensor, torch.UntypedStorage, torch.TypedStorage, nn.Module, tuple, list, dict, UserDict)


def holds_tensors(thing: object) -> bool:
    """Is an object, by its methods, one that holds tensors? Such have a ``to``, or a ``pin_memory``, by which
    a DataLoader knows them.

    No such object is a tensor or module, nor a tuple, list or mapping, which are looked through.
    """
    kind = type(thing)
    found = callable(getattr(kind, "to", None)) or callable(getattr(kind, "pin_memory", None))
    return found and not isinstance(thing, _NONE)


def moved(thing: Any, device: torch.device) -> Any:
    """Such an object on `device`: by its own ``to``, where it has one, and a copy; itself, if it is there."""
    written, tensors = _taken(thing)
    if written and all(tensor.device == device for tensor in tensors):
        return thing
    if not hasattr(thing, "to"):
        return replaced(thing, lambda tensor: tensor.to(device, non_blocking=tensor.is_pinned()))
    there = copy.copy(thing)  # some move themselves and not a copy
    answer = there.to(device)
    return there if answer is None else answer


def held(thing: object) -> list[torch.Tensor]:
    """The tensors in such an object, each once; none where it cannot be pickled."""
    return _taken(thing)[1]


def replaced(thing: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """A copy of such an object with `function` applied to each tensor; itself where pickling makes none."""
    written, tensors = _taken(thing)
    others = [function(tensor) for tensor in tensors]
    with suppress(Exception):  # what a library's class does there is its own affair
        return _Reader(written, others).load() if others else thing
    return thing


def beside(thing: object) -> bytes:
    """What it holds beside tensors, and where it holds those; nothing where it cannot be pickled."""
    return _taken(thing)[0]


def _taken(thing: object) -> tuple[bytes, list[torch.Tensor]]:
    file = io.BytesIO()
    writer = _Writer(file)
    try:
        writer.dump(thing)
    except Exception:  # a class may raise anything there
        return b"", []
    return file.getvalue(), writer.tensors


class _Writer(pickle.Pickler):
    """Writes an object without its tensors, which stay as they are."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, thing: object) -> int | None:
        """The number of a tensor; None of anything else, which is written."""
        if not isinstance(thing, torch.Tensor):
            return None
        number = self._numbers.setdefault(id(thing), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(thing)
        return number


class _Reader(pickle.Unpickler):
    """Reads what `_Writer` has written, with other tensors."""

    def __init__(self, written: bytes, tensors: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(written))
        self._tensors = tensors

    def persistent_load(self, number: int) -> Any:
        """The tensor with this number."""
        return self._tensors[number]
