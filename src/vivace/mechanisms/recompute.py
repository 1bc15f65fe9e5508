"""Recomputation: a block forgets what it saved for the backward pass, and runs again when that is needed.

Only the saved tensors are made again; the graph of the first pass stays, so that its hooks, custom autograd
functions and accumulation act once. The second pass sees the weights, buffers, attributes, random numbers
and autocast that the first one saw; what could make it differ is refused by name. It ends with the last
tensor that is needed, and where only cheap operators run again it gets the results of the others handed back.

`torch.utils.checkpoint` without reentry serves compiled blocks here. On eager ones it would lose something:
its second pass moves BatchNorm's statistics once more, takes the weights as they are by then, makes again
what the block has returned and so is kept anyway, and knows neither streams of Python and NumPy nor hooks
that would run twice.
Source: https://arxiv.org/abs/1604.06174, https://arxiv.org/abs/2205.05198 (selective recomputation)
"""

from __future__ import annotations

import contextlib
import random
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from vivace.errors import Refused
from vivace.mechanisms.beside import OF_MODULES, Beside, objects
from vivace.mechanisms.blocks import Block, foreign_hook, held, is_fake, without_transforms
from vivace.operators import class_of
from vivace.tensors.outside import as_it_is, is_persons
from vivace.tensors.trees import map_tensors, same_numbers, tensors
from vivace.torch_internals.modules import RunningNorm, holding, own_tensors
from vivace.torch_internals.tensors import (
    Operator,
    OperatorMode,
    attention_operators,
    schema_of,
    sharing_versions,
    storage_id,
    storage_ids,
    tree_leaves,
    version_of,
)

DOUBLE_BACKWARD = "the job takes gradients of gradients (create_graph=True)"
EXPENSIVE = [  # operators whose results a cheap second pass keeps: what multiplies matrices
    *(getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm", "convolution")),
    *attention_operators(),
]
SMALL = 2**14  # numbers of a buffer that is always copied, as statistics are
_Buffers = set[tuple[int, str]]  # index in the block's tree, and name


class Recomputer:
    """Runs blocks so that they keep their inputs alone; those named in `cheap` keep `EXPENSIVE` results too.

    Refusals open with the name of the `technique`.

    `passes` counts second passes; `released` holds the bytes that the latest first pass of a block let go.
    """

    def __init__(self, device: torch.device, technique: str, cheap: Collection[str] = ()) -> None:
        self.device, self.technique, self.cheap = device, technique, cheap
        self.passes = 0
        self.released: dict[str, int] = {}
        self.changing: dict[str, _Buffers] = {}  # what a block's forward writes, such as BatchNorm's means

    def around(
        self, block: Block, call: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """The block's result, with its inputs saved alone. Raises Refused, now or in the backward pass."""
        if not torch.is_grad_enabled():
            return call(*arguments, **keywords)
        if torch.compiler.is_compiling():
            selective = partial(create_selective_checkpoint_contexts, EXPENSIVE)
            more: dict[str, Any] = {"context_fn": selective} if block.name in self.cheap else {}
            return checkpoint(call, *arguments, use_reentrant=False, **more, **keywords)
        with without_transforms(self.technique):
            frame = _Frame(self, block, call, arguments, keywords)
            with saved_tensors_hooks(frame.pack, frame.unpack), frame.products or contextlib.nullcontext():
                result = call(*arguments, **keywords)
            frame.close(result)
        return result


class _Enough(BaseException):
    """The second pass has made every tensor that is needed. A block's ``except Exception`` is not meant."""


class _Differs(BaseException):
    """The second pass calls other operators than the first one did."""


class _Place:
    """Stands in the graph for a saved tensor; dies with the graph's node, and its tensor with it."""

    __slots__ = ("__weakref__", "tensor", "version")
    tensor: torch.Tensor | None

    def __init__(self) -> None:
        self.tensor = None
        self.version = 0  # of a tensor that was there all the time


class _Saved(NamedTuple):
    """One tensor that the first pass saved: where it goes, what it is, and how many products came before.

    Noise of a generator that is none of the block's own is seen by its sum alone.
    """

    place: weakref.ref[_Place]
    kind: tuple[torch.Size, torch.dtype]
    layout: tuple[tuple[int, ...], int]
    lazy: bool
    storage: int
    version: int
    num_products: int
    total: torch.Tensor | None  # of its numbers, in a block's first pass


def _is_expensive(function: Operator) -> bool:
    """Does it multiply matrices, or is it a convolution of Vivace's own?"""
    own = function.namespace == "vivace" and class_of(function.overloadpacket.__name__) == "convolution"
    return own or function in EXPENSIVE


class _Products(OperatorMode):  # type: ignore[misc]
    """Keeps the results of expensive operators in the first pass; `again` hands them back in later ones."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept: list[tuple[Any, Any, list[int]]] = []  # operator, detached result, versions
        self.at: int | None = None

    def run_operator(self, function: Operator, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Run or skip the operator. One that draws random numbers runs, so that the stream moves on."""
        if not _is_expensive(function) or _drops(function, arguments, keywords):
            return function(*arguments, **keywords)
        if self.at is None:
            result = function(*arguments, **keywords)
            with sharing_versions():
                kept = map_tensors(result, torch.Tensor.detach)  # shares the version
            self.kept.append((function, kept, [version_of(t) for t in tensors(kept)]))
            return result
        record: tuple[Any, Any, list[int]] = (None, None, [])
        known, kept, versions = self.kept[self.at] if self.at < len(self.kept) else record
        self.at += 1
        if known is not function:
            raise _Differs
        if kept is None or [version_of(t) for t in tensors(kept)] != versions:
            return function(*arguments, **keywords)
        return map_tensors(kept, torch.Tensor.detach)

    def close(self, needed: int) -> None:
        """Forget all but the first `needed` results, and those that were changed in place."""
        self.kept = [
            (function, kept if [version_of(t) for t in tensors(kept)] == versions else None, versions)
            for function, kept, versions in self.kept[:needed]
        ]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Run the block again in the backward pass."""
        self.at = 0
        with self:
            yield


def _drops(function: Operator, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Is it an attention with dropout?"""
    names = [argument.name for argument in schema_of(function).arguments]
    return bool({**dict(zip(names, arguments, strict=False)), **keywords}.get("dropout_p"))


class _Frame:
    """One call of one block: what its second pass needs, and where the tensors go that it makes."""

    def __init__(
        self,
        owner: Recomputer,
        block: Block,
        call: Callable[..., Any],
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> None:
        self.owner, self.block, self.call = owner, block, call
        self.arguments, self.keywords = as_it_is(arguments), as_it_is(keywords)  # a list may grow later
        self.saved: list[_Saved] = []
        self.needed = 0  # of the saved tensors, up to the last one that a second pass must make
        self.products = _Products() if block.name in owner.cheap else None
        self.modules = block.tree()
        self.held = held(self.modules)
        self.weights = [p for parameters, _ in self.held for p in parameters.values() if p is not None]
        self.fake = any(map(is_fake, self.weights))
        kept = [v for m in self.modules for name, v in vars(m).items() if name not in OF_MODULES]
        helpers = objects(kept, is_persons)
        self.own = Beside(map(vars, (*self.modules, *helpers)), OF_MODULES)
        self.given = Beside(map(vars, objects((arguments, keywords))))
        inputs = (*tensors((arguments, keywords)), *self.given.tensors())
        self.inputs, of_modules = _versions(inputs), len(self.modules)
        self.kept = _versions(self.own.tensors(slice(of_modules)))
        self.helped = _versions(self.own.tensors(slice(of_modules, None)))
        self.trained, self.places = _versions(self.weights), storage_ids(self.weights)
        self.fixed: list[tuple[torch.Tensor, int]] = []
        self.streams = self._streams()
        self.autocast = autocasts(owner.device)
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.changing = owner.changing.get(block.name)
        if self.changing is None:
            reason = foreign_hook(block)
            self._require(not reason, f"{reason}, which would run twice")
            self.python, self.sums = _python_streams(), self._sums()
        still = self._buffers() - self.changing if self.changing is not None else set()
        self.still = _versions(self.held[i][1][name] for i, name in still)
        for index, name in self._buffers() - (still - self._copied()):
            buffers = self.held[index][1]
            if buffers[name].layout == torch.strided:  # a sparse one is compared by what it is
                buffers[name] = buffers[name].clone()

    def pack(self, tensor: torch.Tensor) -> _Place:
        place, kind = _Place(), (tensor.shape, tensor.dtype)
        num_products = len(self.products.kept) if self.products else 0
        if tensor.layout != torch.strided:  # it has no storage of its own, and stays
            place.tensor = tensor.detach()
            place.version = version_of(place.tensor)
            sparse = ((), 0), False, 0, place.version
            self.saved.append(_Saved(weakref.ref(place), kind, *sparse, num_products, None))
            return place
        storage = tensor.untyped_storage()
        key, layout = storage_id(storage), (tensor.stride(), int(tensor.storage_offset()))
        dense = layout, _is_lazy(tensor), key, version_of(tensor)
        # No bytes: what a kernel leaves unwritten lies there. And on a GPU sums of one forward may differ.
        numbers = tensor.element_size() > 1 and (tensor.is_floating_point() or tensor.is_complex())
        first = self.changing is None and not self.fake and tensor.device.type == "cpu"
        total = tensor.detach().sum() if first and numbers else None
        self.saved.append(_Saved(weakref.ref(place), kind, *dense, num_products, total))
        if key not in self.storages:
            alive = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self.storages[key] = alive, storage.nbytes()
        return place

    def unpack(self, place: _Place) -> torch.Tensor:
        self._require(
            not torch.is_grad_enabled(), f"{DOUBLE_BACKWARD}, which '{self.block.name}' cannot repeat"
        )
        if place.tensor is None:
            self._run_again()
        if place.tensor is None:
            raise self._differs()
        self._require(
            version_of(place.tensor) == place.version,
            f"the result of '{self.block.name}' is changed in place before its backward pass",
        )
        return place.tensor

    def _point(self, results: list[torch.Tensor]) -> None:
        """What the block saved and returned is there anyway; a second pass serves the rest."""
        dense = (t for t in results if t.layout == torch.strided and not _is_lazy(t))
        returned = {storage_id(t.untyped_storage()): t.detach() for t in dense}
        for number, saved in enumerate(self.saved):
            tensor, place = returned.get(saved.storage), saved.place()
            same = tensor is not None and (version_of(tensor), tensor.dtype) == (saved.version, saved.kind[1])
            if place is not None and tensor is not None and same and not saved.lazy:
                place.tensor = tensor.as_strided(saved.kind[0], *saved.layout)
                place.version = version_of(place.tensor)
            elif place is not None and place.tensor is None:
                self.needed = number + 1

    def close(self, result: object) -> None:
        """The first pass is over: keep what the second one needs, and check that there can be one."""
        name = self.block.name
        if self.changing is None:
            self._require(
                _python_streams() == self.python, f"'{name}' draws random numbers from Python or NumPy itself"
            )
            same = all(map(same_numbers, self.sums, self._sums()))  # by ``.data`` the version stays
            self._require(same, f"'{name}' changes its weights in its forward pass")
            self.changing = self.owner.changing[name] = self._changed()
        self._require(_same(self.inputs), f"'{name}' changes its input in place")
        kept = [*self.kept, *self.helped]  # what a helper counts may be changed after the block
        self._require(_same(kept), f"'{name}' changes a tensor in place that is none of its buffers")
        self._require(_same(self.still), f"'{name}' writes a buffer that it did not write in its first pass")
        same = _same(self.trained) and storage_ids(self.weights) == self.places
        self._require(same, f"'{name}' changes its weights in its forward pass")
        fixed = [*self.weights]
        fixed += [self.held[i][1][key] for i, key in self._buffers() if (i, key) not in self.changing]
        self.fixed = [*self.kept, *_versions(fixed)]
        if all(map(torch.equal, self.streams, self._streams())):
            self.streams = []
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self._point(results)
        alive = [*fixed, *(t for t, _ in self.inputs), *results]
        self.owner.released[name] = self._released(storage_ids(alive))
        self.storages.clear()

    def _released(self, alive: set[int]) -> int:
        """Bytes that the block saved and let go, less those of products that it would not have saved."""
        sizes = {key: size for key, (_, size) in self.storages.items() if key not in alive}
        if self.products:
            self.products.close(self.saved[self.needed - 1].num_products if self.needed else 0)
            found = (t for _, kept, _ in self.products.kept for t in tensors(kept))
            for storage in (t.untyped_storage() for t in found if t.layout == torch.strided):
                key = storage_id(storage)
                if key not in alive:
                    sizes[key] = 0 if key in sizes else -storage.nbytes()
        return sum(sizes.values())

    def _run_again(self) -> None:
        self._require(
            _same(self.fixed) and _same(self.inputs),
            f"a weight or an input of '{self.block.name}' is changed in place before its backward pass",
        )
        self.owner.passes += 1
        made = 0

        def fill(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal made
            saved = self.saved[made]
            if (tensor.shape, tensor.dtype) != saved.kind:
                raise self._differs()
            if saved.total is not None and not same_numbers(tensor.detach().sum(), saved.total):
                raise self._differs()
            place = saved.place()
            if place is not None and place.tensor is None:
                place.tensor = tensor.detach()
                place.version = version_of(place.tensor)
            made += 1
            if made == self.needed:
                raise _Enough
            return tensor.detach()

        with (
            contextlib.suppress(_Enough),
            self._as_it_was(),
            saved_tensors_hooks(fill, lambda tensor: tensor),
            self.products.again() if self.products else contextlib.nullcontext(),
        ):
            try:
                self.call(*self.arguments, **self.keywords)
            except _Differs:
                raise self._differs() from None
        if not _same(self.fixed):
            raise self._differs()

    @contextlib.contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """Weights, buffers, attributes, random numbers and autocast of the first pass; what the second one
        writes is lost.
        """
        own = [(parameters, dict(buffers)) for parameters, buffers in self.held]
        for index, name in self._copied():
            copy = own[index][1][name] = own[index][1][name].clone()  # there may be a third pass
            if (index, name) not in (self.changing or ()):
                self.fixed += _versions([copy])
        now = self._streams() if self.streams else []
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for settings in self.autocast:
                stack.enter_context(torch.autocast(**settings))
            stack.enter_context(self.own.again())
            stack.enter_context(self.given.again())
            stack.enter_context(holding(self.modules, own))
            stack.callback(self._set_streams, now)
            self._set_streams(self.streams)
            yield

    def _streams(self) -> list[torch.Tensor]:
        if self.fake:
            return []
        device = self.owner.device
        on_device = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
        return [torch.get_rng_state(), *on_device]

    def _set_streams(self, states: list[torch.Tensor]) -> None:
        if states:
            torch.set_rng_state(states[0])
        for state in states[1:]:
            torch.cuda.set_rng_state(state, self.owner.device)

    def _sums(self) -> list[torch.Tensor]:
        """Of all weights' numbers on a CPU; a copy would take as much memory again."""
        plain = [w for w in self.weights if type(w) in (torch.Tensor, nn.Parameter) and w.element_size() > 1]
        return [] if self.fake else [weight.detach().sum() for weight in plain if weight.device.type == "cpu"]

    def _buffers(self) -> _Buffers:
        return {
            (i, n) for i, (_, buffers) in enumerate(self.held) for n, b in buffers.items() if b is not None
        }

    def _copied(self) -> _Buffers:
        """The buffers that a second pass gets copies of: those that the first one writes, and small ones.

        Kernels of batch normalisation do not raise a tensor's version, and write in training mode alone, in
        which the block's first pass may not have been.
        """
        dense = {at for at in self._buffers() if self.held[at[0]][1][at[1]].layout == torch.strided}
        small = {(i, name) for i, name in dense if self.held[i][1][name].numel() <= SMALL}
        return small | (self.changing or set())

    def _changed(self) -> _Buffers:
        """The buffers that the first pass has written; the clones of all others but small ones are let go.

        Kernels of batch normalisation do not raise a tensor's version, so values are compared.
        """
        changed, copied = set[tuple[int, str]](), self._copied()
        for index, name in self._buffers():
            module, buffers = self.modules[index], self.held[index][1]
            now = own_tensors(module)[1][name]
            same = now is buffers[name] or (
                isinstance(now, torch.Tensor) and (self.fake or torch.equal(now, buffers[name]))
            )
            if isinstance(module, RunningNorm) or not same:
                changed.add((index, name))
            elif (index, name) not in copied:
                buffers[name] = now
        return changed

    def _differs(self) -> Refused:
        return Refused(f"'{self.block.name}' does not do the same when it runs again").by(
            self.owner.technique
        )

    def _require(self, condition: object, reason: str) -> None:
        if not condition:
            raise Refused(reason).by(self.owner.technique)


def _versions(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
    """Each with its version; those of inference mode have none."""
    return [(tensor, version_of(tensor)) for tensor in tensors if not tensor.is_inference()]


def _same(tensors: list[tuple[torch.Tensor, int]]) -> bool:
    return all(version_of(tensor) == version for tensor, version in tensors)


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Do its numbers lie in memory with another sign?"""
    return tensor.is_conj() or tensor.is_neg()


def autocasts(device: torch.device) -> list[dict[str, Any]]:
    """The arguments of `torch.autocast` that hold now, for the CPU and for `device`."""
    return [
        {
            "device_type": kind,
            "enabled": torch.is_autocast_enabled(kind),
            "dtype": torch.get_autocast_dtype(kind),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        for kind in dict.fromkeys(("cpu", device.type))
    ]


def _python_streams() -> tuple[Any, ...]:
    state: Any = numpy.random.get_state()
    return random.getstate(), state[1].tobytes(), state[2:]
