"""Recomputation: a block forgets what it saved for the backward pass, and runs again when that is needed.

Only the saved tensors are made again; the graph of the first pass stays, so that its hooks, custom autograd
functions and accumulation act once. The second pass sees the weights, buffers, random numbers and autocast
that the first one saw; what could make it differ is refused by name.
Source: https://arxiv.org/abs/1604.06174
"""

from __future__ import annotations

import contextlib
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
import torch.utils.checkpoint
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from vivace.blocks import Block, foreign_hook, held, holding, is_fake
from vivace.errors import Refused
from vivace.surgery import tensors

TECHNIQUE = "checkpoint"
DOUBLE_BACKWARD = "the job takes gradients of gradients (create_graph=True)"
_Buffers = set[tuple[int, str]]  # index in the block's tree, and name


class Recomputer:
    """Runs blocks so that they keep their inputs alone.

    `passes` counts second passes; `released` holds the bytes that the latest first pass of a block let go.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
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
            return torch.utils.checkpoint.checkpoint(call, *arguments, use_reentrant=False, **keywords)
        frame = _Frame(self, block, call, arguments, keywords)
        with saved_tensors_hooks(frame.pack, frame.unpack):
            result = call(*arguments, **keywords)
        frame.close()
        return result


class _Enough(Exception):
    """The second pass has made every tensor that was saved."""


class _Place:
    """Stands in the graph for a saved tensor; dies with the graph's node, and its tensor with it."""

    __slots__ = ("__weakref__", "tensor")
    tensor: torch.Tensor | None

    def __init__(self) -> None:
        self.tensor = None


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
        self.arguments, self.keywords = arguments, keywords
        self.places: list[tuple[weakref.ref[_Place], torch.Size, torch.dtype]] = []
        self.modules = block.tree()
        self.held = held(self.modules)
        self.fake = any(is_fake(p) for parameters, _ in self.held for p in parameters.values())
        self.inputs = [(tensor, tensor._version) for tensor in tensors((arguments, keywords))]
        self.fixed: list[tuple[torch.Tensor, int]] = []
        self.streams = self._streams()
        self.autocast = [_autocast(kind) for kind in dict.fromkeys(("cpu", owner.device.type))]
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.changing = owner.changing.get(block.name)
        if self.changing is None:
            reason = foreign_hook(block)
            _require(not reason, f"{reason}, which would run twice")
            self.python = _python_streams()
        still = self._buffers() - self.changing if self.changing is not None else set()
        self.still = [(b, b._version) for b in (self.held[i][1][name] for i, name in still)]
        for index, name in self._buffers() - still:
            buffers = self.held[index][1]
            buffers[name] = buffers[name].clone()

    def pack(self, tensor: torch.Tensor) -> _Place:
        place = _Place()
        self.places.append((weakref.ref(place), tensor.shape, tensor.dtype))
        storage = tensor.untyped_storage()
        if storage._cdata not in self.storages:
            alive = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self.storages[storage._cdata] = alive, storage.nbytes()
        return place

    def unpack(self, place: _Place) -> torch.Tensor:
        _require(not torch.is_grad_enabled(), f"{DOUBLE_BACKWARD}, which '{self.block.name}' cannot repeat")
        if place.tensor is None:
            self._run_again()
        if place.tensor is None:
            raise self._differs()
        return place.tensor

    def close(self) -> None:
        """The first pass is over: keep what the second one needs, and check that there can be one."""
        name = self.block.name
        if self.changing is None:
            _require(
                _python_streams() == self.python, f"'{name}' draws random numbers from Python or NumPy itself"
            )
            self.changing = self.owner.changing[name] = self._changed()
        _require(_same(self.inputs), f"'{name}' changes its input in place")
        _require(_same(self.still), f"'{name}' writes a buffer that it did not write in its first pass")
        fixed = [t for parameters, _ in self.held for t in parameters.values() if t is not None]
        fixed += [self.held[i][1][key] for i, key in self._buffers() if (i, key) not in self.changing]
        self.fixed = [(tensor, tensor._version) for tensor in fixed]
        if all(map(torch.equal, self.streams, self._streams())):
            self.streams = []
        alive = {t.untyped_storage()._cdata for t in (*fixed, *(t for t, _ in self.inputs))}
        self.owner.released[name] = sum(n for key, (_, n) in self.storages.items() if key not in alive)
        self.storages.clear()

    def _run_again(self) -> None:
        _require(
            _same(self.fixed) and _same(self.inputs),
            f"a weight or an input of '{self.block.name}' is changed in place before its backward pass",
        )
        self.owner.passes += 1
        made = 0

        def fill(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal made
            reference, shape, dtype = self.places[made]
            if (tensor.shape, tensor.dtype) != (shape, dtype):
                raise self._differs()
            place = reference()
            if place is not None:
                place.tensor = tensor.detach()
            made += 1
            if made == len(self.places):
                raise _Enough
            return tensor.detach()

        with (
            contextlib.suppress(_Enough),
            self._as_it_was(),
            saved_tensors_hooks(fill, lambda tensor: tensor),
        ):
            self.call(*self.arguments, **self.keywords)
        if not _same(self.fixed):
            raise self._differs()

    @contextlib.contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """Weights, buffers, random numbers and autocast of the first pass; what the second writes is lost."""
        own = [(parameters, dict(buffers)) for parameters, buffers in self.held]
        for index, name in self.changing or ():
            own[index][1][name] = own[index][1][name].clone()  # there may be a third pass
        now = self._streams() if self.streams else []
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for settings in self.autocast:
                stack.enter_context(torch.autocast(**settings))
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
        for state, put in zip(states, (torch.set_rng_state, self._set_on_device), strict=False):
            put(state)

    def _set_on_device(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state, self.owner.device)

    def _buffers(self) -> _Buffers:
        return {
            (i, n) for i, (_, buffers) in enumerate(self.held) for n, b in buffers.items() if b is not None
        }

    def _changed(self) -> _Buffers:
        """The buffers that the first pass has written; the clones of all others are let go.

        Kernels of batch normalisation do not raise a tensor's version, so values are compared.
        """
        changed: _Buffers = set()
        for index, name in self._buffers():
            module, buffers = self.modules[index], self.held[index][1]
            now = module._buffers[name]
            same = isinstance(now, torch.Tensor) and (self.fake or torch.equal(now, buffers[name]))
            if isinstance(module, nn.modules.batchnorm._NormBase) or not same:
                changed.add((index, name))
            else:
                buffers[name] = now
        return changed

    def _differs(self) -> Refused:
        return Refused(f"'{self.block.name}' does not do the same when it runs again").by(TECHNIQUE)


def _require(condition: object, reason: str) -> None:
    if not condition:
        raise Refused(reason).by(TECHNIQUE)


def _same(tensors: list[tuple[torch.Tensor, int]]) -> bool:
    return all(tensor._version == version for tensor, version in tensors)


def _autocast(kind: str) -> dict[str, Any]:
    return {
        "device_type": kind,
        "enabled": torch.is_autocast_enabled(kind),
        "dtype": torch.get_autocast_dtype(kind),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }


def _python_streams() -> tuple[Any, ...]:
    state: Any = numpy.random.get_state()
    return random.getstate(), state[1].tobytes(), state[2:]
