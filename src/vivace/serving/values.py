"""What a model is given and returns beside its tensors: another form of it knows the tensors alone."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import UserDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy
import torch
from torch.nn.utils.rnn import PackedSequence

from vivace.errors import Refused
from vivace.tensors.trees import fields_of

IN_CONTAINERS = (
    "let it return tensors, in tuples, lists, dicts or dataclasses, and the same ones in each call"
)


def array_of(tensor: torch.Tensor, said: str) -> numpy.ndarray[Any, Any]:
    """A tensor as other runtimes take it, row by row. Raises Refused where they have no such numbers.

    `said` is what the model does with it: ``is called with`` or ``returns``.
    """
    try:
        return tensor.detach().cpu().contiguous().numpy()
    except (TypeError, RuntimeError):  # bfloat16, or a layout that is not dense
        numbers = str(tensor.dtype if tensor.layout == torch.strided else tensor.layout).rpartition(".")[2]
        raise Refused(
            f"the model {said} a tensor of {numbers}, which cannot be handed to another runtime: let it "
            "take and return dense fp32"
        ) from None


@contextlib.contextmanager
def padding_computed() -> Iterator[None]:
    """Inside, torch's transformer layers compute at padded positions in evaluation too, as all files do of
    them: their fast path has zeros there.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def require_alike(given: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
    """Raises Refused where what a call has beside its tensors differs: a file holds it fixed."""
    first = dict(_beside_tensors(given[0]))
    for one in given[1:]:
        other = dict(_beside_tensors(one))
        differing = _differing(first, other)
        if differing or list(first) != list(other):
            raise Refused(
                f"the job's metric calls the model with another {differing or 'order of arguments'} from "
                "call to call: a served model holds fixed all that is no tensor, so let the metric call it "
                "in one way"
            )


def require_tensors(returned: Sequence[object]) -> None:
    """Raises Refused where another form of the model could not return, as tensors, what it returns in its
    calls. Objects beside them are left to `Untold`.
    """
    first = _told(returned[0])
    if torch.Tensor not in first.values():
        raise Refused(f"the model returns no tensor, but a {type(returned[0]).__name__}: {IN_CONTAINERS}")
    for name, value in first.items():
        varies = isinstance(value, (int, float, str)) and not isinstance(value, bool)
        if value is PackedSequence or (varies and len(returned) == 1):
            kind = "PackedSequence" if value is PackedSequence else type(value).__name__
            raise Refused(f"the model returns a {kind} ('{name}'): {IN_CONTAINERS}")
    for one in returned[1:]:
        differing = _differing(first, _told(one))
        if differing:
            raise Refused(f"the model returns another '{differing}' from call to call: {IN_CONTAINERS}")


class Untold:
    """Stands for an object that a model returns beside its tensors, as a cache: no other form returns it.

    Raises Refused where anything is asked of it.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __getattr__(self, name: str) -> Any:
        raise Refused(
            f"the job's metric uses a {self.kind} that the model returns, of which another form tells "
            f"nothing: {IN_CONTAINERS}"
        )


def is_object(value: object) -> bool:
    """Is it neither a tensor nor a container, nor a plain value?"""
    if isinstance(value, (torch.Tensor, tuple, list, dict, UserDict, bool, int, float, str, type)):
        return isinstance(value, PackedSequence)
    return value is not None and not dataclasses.is_dataclass(value)


def _told(returned: object) -> dict[str, object]:
    """What a call returned, by where it stands; of objects only their class."""
    found = dict(_leaves(returned, "output"))
    return {name: type(value) if is_object(value) else value for name, value in found.items()}


def _beside_tensors(given: tuple[tuple[Any, ...], dict[str, Any]]) -> Iterator[tuple[str, object]]:
    """All that a call is given, by where it stands; of a tensor only that there is one."""
    args, kwargs = given
    for place, value in [*enumerate(args, 1), *kwargs.items()]:
        yield from _leaves(value, f"argument {place}" if isinstance(place, int) else f"'{place}'")


def _leaves(value: object, name: str) -> Iterator[tuple[str, object]]:
    """A tensor's class stands for the tensor, and a container's before what it holds."""
    parts: list[tuple[object, object]] | None = None
    if isinstance(value, (tuple, list)) and not is_object(value):
        parts = list(enumerate(value))
    elif isinstance(value, (dict, UserDict)):
        parts = list(value.items())
    elif (names := fields_of(value)) is not None:
        parts = [(each, getattr(value, each)) for each in names]
    if parts is None:
        yield name, torch.Tensor if isinstance(value, torch.Tensor) else value
        return
    yield name, type(value)
    for key, part in parts:
        yield from _leaves(part, f"{name}[{key!r}]")


def _differing(ones: dict[str, object], others: dict[str, object]) -> str:
    """The name of the first that is not the same in both; empty where all are."""
    for name in {**ones, **others}:
        if name not in ones or name not in others or not _equal(ones[name], others[name]):
            return name
    return ""


def _equal(one: object, other: object) -> bool:
    if isinstance(one, numpy.ndarray) or isinstance(other, numpy.ndarray):
        return bool(numpy.array_equal(numpy.asarray(one), numpy.asarray(other)))
    try:
        return one is other or bool(one == other)
    except Exception:  # a person's class, which may compare by element
        return False
