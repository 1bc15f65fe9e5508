"""Trees of tensors: batches in tuples, lists, mappings, dataclasses, and objects such as graphs."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
import os
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy
import torch
from torch.nn.utils.rnn import PackedSequence

from vivace.errors import Refused
from vivace.tensors import objects
from vivace.torch_internals.tensors import version_of

Tree: TypeAlias = object
"""Tensors in any containers, as batches are (`vivace.job.Batch`), and whatever else stands among them."""

Digest = tuple[str, ...]  # of each tensor of a batch
_unlike = itertools.count()
_BESIDE = (bool, int, float, complex, str, bytes, type(None), numpy.ndarray, numpy.generic)


def map_tensors(
    batch: Tree, function: Callable[[Any], Any], whole: Callable[[object], bool] | None = None
) -> Any:
    """A copy of `batch` with `function` applied to each tensor in tuples, lists, mappings, dataclasses, and
    objects that hold tensors (`vivace.tensors.objects`).

    What `whole` holds for is given to `function` as it is; it is not asked of what such an object holds.
    """
    if isinstance(batch, torch.Tensor) or (whole is not None and whole(batch)):
        return function(batch)
    if isinstance(batch, PackedSequence):  # whose lengths stay on the CPU
        return _mapped_sequence(batch, function)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(item, function, whole) for item in batch))
    if isinstance(batch, (tuple, list)):
        return _like(batch, [map_tensors(item, function, whole) for item in batch])
    if isinstance(batch, (dict, UserDict)):  # such as transformers' BatchEncoding
        entries = {key: map_tensors(value, function, whole) for key, value in batch.items()}
        if type(batch) is dict:  # torch.compile follows no copy of one
            return entries
        mapped: Any = copy.copy(batch)  # with the attributes that it has beside its entries
        for key, value in entries.items():
            mapped[key] = value
        return mapped
    if (names := fields_of(batch)) is not None:
        found = copy.copy(batch)  # and not `replace`: a __post_init__ would act on its own results
        for name in names:
            object.__setattr__(found, name, map_tensors(getattr(batch, name), function, whole))
        return found
    return objects.replaced(batch, function) if objects.holds_tensors(batch) else batch


def _like(batch: list[Any] | tuple[Any, ...], items: list[Any]) -> Any:
    """A list or tuple of these, of the batch's own class and with what else it holds."""
    if type(batch) in (list, tuple):
        return type(batch)(items)
    if isinstance(batch, list):
        found = copy.copy(batch)
        found[:] = items
        return found
    try:
        alike = tuple.__new__(type(batch), items)
    except TypeError:  # of C's own, such as torch.Size
        return type(batch)(items)
    vars(alike).update(getattr(batch, "__dict__", {})) if hasattr(alike, "__dict__") else None
    return alike


class Again:
    """Gives copies of one batch for step after step: the same one, until a step has written into it. The
    batch itself is never given, so that whoever holds it finds it as it was.
    """

    def __init__(self, batch: Tree) -> None:
        self._kept = batch
        self._renew()

    def __call__(self) -> Any:
        """The batch for the next step."""
        if _versions(self._batch) != self._versions:
            self._renew()
        return self._batch

    def _renew(self) -> None:
        self._batch = map_tensors(self._kept, _copied)
        self._versions = _versions(self._batch)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy where the tensor lies, which asks for a gradient where that does."""
    copied = tensor.detach().clone()
    pinned = tensor.layout == torch.strided and tensor.device.type == "cpu" and tensor.is_pinned()
    return (copied.pin_memory() if pinned else copied).requires_grad_(tensor.requires_grad)


def _versions(batch: Tree) -> list[int]:
    """Other ones each time of tensors that do not count who writes into them, made in inference mode."""
    return [next(_unlike) if tensor.is_inference() else version_of(tensor) for tensor in tensors(batch)]


def fields_of(thing: object) -> list[str] | None:
    """The names of a dataclass's fields that are set; None of anything else, and of what keeps its fields in
    a way of its own, as a `tensorclass` does.
    """
    if not dataclasses.is_dataclass(thing) or isinstance(thing, type):
        return None
    names = [field.name for field in dataclasses.fields(thing) if hasattr(thing, field.name)]
    own = getattr(thing, "__dict__", None)
    elsewhere = own is not None and objects.holds_tensors(thing) and not own.keys() >= set(names)
    return None if elsewhere else names


def is_object(part: object) -> bool:
    """Is it an object that holds tensors, and is asked for them: nothing that is looked through?"""
    return objects.holds_tensors(part) and not _is_packed(part) and fields_of(part) is None


def _mapped_sequence(batch: PackedSequence, function: Callable[[torch.Tensor], Any]) -> PackedSequence:
    data = function(batch.data)
    orders = [
        None if one is None else one.to(data.device) for one in (batch.sorted_indices, batch.unsorted_indices)
    ]
    return PackedSequence(data, batch.batch_sizes, *orders)


def tensors(batch: Tree) -> Iterator[torch.Tensor]:
    """Every tensor of a batch, depth first."""
    return _parts(batch, None)


def contents(batch: Tree) -> Iterator[Any]:
    """Every tensor, array and text of a batch, depth first."""
    return _parts(batch, lambda part: isinstance(part, numpy.ndarray | str))


def _parts(batch: Tree, whole: Callable[[object], bool] | None) -> Iterator[Any]:
    """What `map_tensors` gives to its function."""
    if isinstance(batch, torch.Tensor) or (whole is not None and whole(batch)):
        yield batch
        return
    parts: Iterable[Any] = ()
    if isinstance(batch, (tuple, list)):
        parts = batch
    elif isinstance(batch, (dict, UserDict)):
        parts = batch.values()
    elif (names := fields_of(batch)) is not None:
        parts = (getattr(batch, name) for name in names)
    elif is_object(batch):
        parts = objects.held(batch)
    for part in parts:
        yield from _parts(part, whole)


def bytes_of(found: Iterable[torch.Tensor]) -> int:
    """Of all elements; memory that two of them share counts twice."""
    return sum(tensor.numel() * tensor.element_size() for tensor in found)


def cast(batch: Tree, before: torch.dtype, after: torch.dtype) -> Any:
    """A copy of `batch` in which tensors of dtype `before` have dtype `after`."""
    return map_tensors(batch, lambda tensor: tensor.to(after) if tensor.dtype == before else tensor)


class Written:
    """What a callee puts into the lists, mappings and dataclasses of `lent`, a copy of the arguments `given`
    with tensors of another dtype, such as an auxiliary loss into a list.
    """

    def __init__(self, given: tuple[Any, ...], lent: tuple[Any, ...]) -> None:
        self._pairs: list[tuple[Any, Any, dict[Any, Any]]] = []
        waiting: list[tuple[Any, Any]] = [(given, lent)]
        while waiting:
            own, copied = waiting.pop()
            if fields_of(own):
                own, copied = (getattr(one, "__dict__", {}) for one in (own, copied))
            if not isinstance(own, (list, tuple, dict, UserDict)):
                continue
            if not isinstance(own, tuple):
                self._pairs.append((own, copied, dict(_entries(copied))))
            inner = (part if isinstance(part, (list, tuple)) else part.values() for part in (own, copied))
            waiting += zip(*inner, strict=True)

    def hand_back(self, before: torch.dtype, after: torch.dtype) -> None:
        """Put it into those of `given`, too, cast as `returned` does."""
        for own, copied, then in self._pairs:
            now, held = dict(_entries(copied)), dict(_entries(own))
            others = {key for key, value in now.items() if key not in then or value is not then[key]}
            if not others and len(now) == len(then):
                continue
            held = {key: returned(now[key], before, after) if key in others else held[key] for key in now}
            if isinstance(own, list):
                own[:] = held.values()
            else:
                own.clear()
                own.update(held)


def _entries(space: list[Any] | dict[Any, Any]) -> Iterable[tuple[Any, Any]]:
    return enumerate(space) if isinstance(space, list) else space.items()


def returned(outputs: Tree, before: torch.dtype, after: torch.dtype) -> Any:
    """What a model returns, cast as `cast` does, and in namespaces and distributions too: copies of those in
    whose attributes something of dtype `before` stands. Other objects stay: a cache of keys and values, for
    one, goes into the model again.
    """
    known: dict[int, Any] = {}  # as an object may hold another, and that one the first
    count = 0

    def turn(part: Any) -> Any:
        nonlocal count
        if isinstance(part, torch.Tensor):
            count += part.dtype == before
            return part.to(after) if part.dtype == before else part
        if id(part) not in known:
            known[id(part)], so_far = part, count
            turned = {name: map_tensors(value, turn, _has_outputs) for name, value in vars(part).items()}
            if count != so_far:
                known[id(part)] = copy.copy(part)
                vars(known[id(part)]).update(turned)
        return known[id(part)]

    return map_tensors(outputs, turn, _has_outputs)


def _has_outputs(part: object) -> bool:
    return isinstance(part, SimpleNamespace | torch.distributions.Distribution)


def outline(batch: Tree) -> str:
    """How a batch is built: its tree with the shapes and dtypes of its tensors, and all else that it holds.

    What stays on the CPU of packed sequences, their lengths, is among that.
    """
    return repr(map_tensors(batch, _outlined, _is_uncut))


def _outlined(part: Any) -> tuple[object, ...]:
    if isinstance(part, PackedSequence):
        return (*_outlined(part.data), part.batch_sizes.tolist(), part.sorted_indices is None)
    if is_object(part):
        beside = objects.beside(part) or next(_unlike)  # what is not looked into is another one each time
        return (beside, *map(_outlined, objects.held(part)))
    return tuple(part.shape), part.dtype


def batch_size(batch: Tree) -> int:
    """Samples in a batch: the length of its first tensor that has a dimension, else of an array, else 1.

    Of lists with one item for each sample, as a detector gets them, it is their length, of packed sequences
    their number, and of an object that holds tensors what it says itself: its `batch_size`, such as graphs.
    """
    if columns := _columns(batch):
        return len(columns[0])
    for part in _uncut(batch):
        own = part.batch_sizes if _is_packed(part) else getattr(part, "batch_size", ())
        size = [own] if isinstance(own, int) else own
        if isinstance(size, Sequence | torch.Tensor) and len(size):
            return int(size[0])
    arrays = (part for part in _parts(batch, _is_array) if _is_array(part))
    return next((int(part.shape[0]) for part in itertools.chain(tensors(batch), arrays) if part.ndim), 1)


def _is_array(part: object) -> bool:
    return isinstance(part, numpy.ndarray)


def _uncut(batch: Tree) -> list[Any]:
    """A batch's packed sequences, whose rows are steps in time, and its objects, whose rows are their own."""
    return [part for part in _parts(batch, _is_uncut) if _is_uncut(part)]


def _is_uncut(part: object) -> bool:
    return _is_packed(part) or is_object(part)


def _is_packed(part: object) -> bool:
    return isinstance(part, PackedSequence)


def _columns(batch: Tree) -> list[Any]:
    """A batch's lists where it consists of such, each with one item for each sample; else nothing.

    One of them must hold mappings, texts or numbers, and the tensors must differ in length: pairs of batches,
    and several inputs of a model, are lists as well.
    """
    found = list(batch.values()) if isinstance(batch, (dict, UserDict)) else batch
    if not isinstance(found, (list, tuple)) or not all(type(one) in (list, tuple) and one for one in found):
        return []
    if len({len(one) for one in found}) != 1 or len({t.shape[:1] for t in tensors(batch)}) == 1:
        return []
    told = any(all(isinstance(item, (Mapping, str, int, float)) for item in one) for one in found)
    return list(found) if told else []


def _rows_of(batch: Tree) -> Callable[[object], bool]:
    """``(part) -> bool``: does it hold one item for each sample of the batch, without being a tensor?"""
    columns, total = _columns(batch), batch_size(batch)

    def whole(part: object) -> bool:
        if columns:
            return any(part is one for one in columns)
        if isinstance(part, numpy.ndarray):
            return bool(part.ndim and len(part) == total)
        if part is batch or not isinstance(part, (list, tuple)) or hasattr(part, "_fields"):
            return False
        batched = [bool(tensor.dim() and tensor.shape[0] == total) for tensor in tensors(part)]
        if all(isinstance(item, Mapping) for item in part):  # one of which may have as many boxes by chance
            return len(part) == total and not (batched and all(batched))
        return len(part) == total and not any(batched)

    return whole


def split(batch: Tree, size: int) -> list[Any]:
    """Cut a batch into pieces of at most `size` samples: tensors, arrays, and lists with an item a sample.

    What has another length stands in every piece; a batch without samples is one piece. Raises Refused where
    a packed sequence, an object that holds tensors, or a sparse tensor is among them.
    """
    for part in _uncut(batch):
        kind = "packed sequence" if _is_packed(part) else type(part).__name__
        raise Refused(f"a {kind} cannot be cut into pieces")
    if any(tensor.layout != torch.strided for tensor in tensors(batch)):
        raise Refused("a sparse tensor cannot be cut into pieces")
    total, whole = batch_size(batch), _rows_of(batch)
    if not total:
        return [batch]

    def piece(start: int) -> Any:
        def cut(part: Any) -> Any:
            stays = isinstance(part, torch.Tensor) and not (part.dim() and part.shape[0] == total)
            return part if stays else part[start : start + size]

        return map_tensors(batch, cut, whole)

    return [piece(start) for start in range(0, total, size)]


def joined(batches: Sequence[Any]) -> Any:
    """One batch of several, the inverse of `split`; None where their tensors differ in shape or number, or
    lie in what cannot be cut.
    """
    if _uncut(batches[0]):
        return None
    total, found = batch_size(batches[0]), [list(_parts(batch, _rows_of(batch))) for batch in batches]
    if len({tuple(map(_kind, each)) for each in found}) > 1:
        return None
    rows = iter(zip(*found, strict=True))

    def join(first: Any) -> Any:
        group = next(rows)
        if _is_array(first):
            return numpy.concatenate(group)
        if not isinstance(first, torch.Tensor):
            return type(first)(itertools.chain.from_iterable(group))
        return torch.cat(group) if first.dim() and first.shape[0] == total else first

    return map_tensors(batches[0], join, _rows_of(batches[0]))


def beside_samples(batch: Tree) -> set[Digest]:
    """Digests of what a batch holds beside its samples, such as one number for all of them: of several,
    `joined` keeps the first one's.
    """
    total, rows = batch_size(batch), _rows_of(batch)
    parts = (p for p in _parts(batch, lambda p: rows(p) or isinstance(p, _BESIDE)) if not rows(p))
    found = (p for p in parts if not (isinstance(p, torch.Tensor) and p.dim() and len(p) == total))
    return {(*digest(part), digest_beside_tensors(part)) for part in found}


def _kind(part: Any) -> tuple[Any, ...]:
    """What parts of two batches must have in common to be joined."""
    return (type(part),) if isinstance(part, (list, tuple)) else (part.shape[1:], part.dtype)


def same_numbers(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Are two tensors of one device equal, number for number? NaN is as NaN, as in data with gaps."""
    mine, theirs = mine.to_dense(), theirs.to_dense()
    if torch.equal(mine, theirs):
        return True
    alike = (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
    if not (alike and (mine.is_floating_point() or mine.is_complex())):
        return False
    return bool(((mine == theirs) | ((mine != mine) & (theirs != theirs))).all())


def digest(batch: Tree) -> Digest:
    """A digest of each tensor of a batch: of its dtype, its shape and its bytes."""
    return tuple(_of_tensor(tensor) for tensor in tensors(batch))


def digest_beside_tensors(batch: Tree) -> str:
    """A digest of the numbers, texts and arrays that a batch holds beside tensors.

    Of a text that is an absolute path only the name counts: the same file may lie elsewhere.
    """
    found = hashlib.sha256()
    for part in _parts(batch, lambda part: isinstance(part, _BESIDE)):
        if isinstance(part, numpy.ndarray | numpy.generic):
            head = f"{part.dtype} {part.shape} "
            found.update(head.encode() + (part.tobytes() if part.dtype.kind != "O" else b""))
        elif not isinstance(part, torch.Tensor):
            path = isinstance(part, str) and os.path.isabs(part)
            found.update(f"{type(part).__name__} {os.path.basename(part) if path else part!r} ".encode())
    return found.hexdigest()[:20]


def _of_tensor(tensor: torch.Tensor) -> str:
    plain = tensor.detach().cpu()
    if plain.layout != torch.strided:
        plain = plain.to_dense()
    plain = plain.resolve_conj().resolve_neg()
    content = plain.contiguous().flatten().view(torch.uint8) if plain.numel() else plain
    head = f"{plain.dtype} {tuple(plain.shape)} ".encode()
    return hashlib.sha256(head + content.numpy().tobytes()).hexdigest()[:20]
