"""CUDA streams and graphs acted out on a CPU: the Python around them can be tried without a GPU.

A stream does nothing, because a CPU works in order. A graph is the list of operators that ran while it was
captured: what they changed is put back afterwards, since a capture trains nothing, and a replay runs them
again on the same memory. What a capture forbids (reading a number back) is forbidden here too. Kernels,
clocks, races and memory need the real thing.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import torch

from vivace.technique import registry
from vivace.tensors.trees import tensors
from vivace.torch_internals.tensors import Operator, OperatorMode, below_autograd, schema_of

FORBIDDEN = ("_local_scalar_dense", "nonzero")


class Stream:
    """A stream or an event: whatever waits for it need not."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_stream(self, _: object) -> None:
        """Return at once: what is stood in for has happened already."""

    wait_event = record = wait_stream

    def synchronize(self) -> None:
        """Return at once: what is stood in for has happened already."""

    def record_event(self) -> Stream:
        """An event that has happened."""
        return self


class Graph(OperatorMode):  # type: ignore[no-untyped-call]
    """A graph, and the context in which it is captured."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.random = torch.get_rng_state()
        self.calls: list[tuple[Any, Any, Any, dict[int, torch.Tensor]]] = []
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.born: set[int] = set()

    def __enter__(self) -> Self:
        self.random = torch.get_rng_state()
        return super().__enter__()  # type: ignore[no-any-return,no-untyped-call]

    def run_operator(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator and note it; keep what it is about to change."""
        if any(name in func.__name__ for name in FORBIDDEN):
            raise RuntimeError(f"operation not permitted when stream is capturing: {func.__name__}")
        for tensor in _written(func, args, kwargs):
            place = tensor.untyped_storage().data_ptr()
            if place not in self.born and place not in self.before:
                self.before[place] = (tensor, tensor.clone())
        given = {t.untyped_storage().data_ptr() for t in tensors([list(args), kwargs])}
        result = func(*args, **kwargs)
        results = list(tensors([result]))
        fresh = {i: t for i, t in enumerate(results) if t.untyped_storage().data_ptr() not in given}
        self.born.update(t.untyped_storage().data_ptr() for t in fresh.values())
        self.calls.append((func, args, kwargs, fresh))
        return result

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        torch.set_rng_state(self.random)
        with torch.no_grad():
            for tensor, value in self.before.values():
                tensor.copy_(value)
        self.before.clear()

    def replay(self) -> None:
        """Run every operator again, on the memory that it was captured with."""
        with below_autograd():
            for func, args, kwargs, fresh in self.calls:
                results = list(tensors([func(*args, **kwargs)]))
                for index, tensor in fresh.items():
                    tensor.copy_(results[index])


def _written(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments that an operator changes, by its schema; BatchNorm's hides some."""
    found: list[torch.Tensor] = []
    for index, argument in enumerate(schema_of(func).arguments):
        marked = argument.alias_info is not None and argument.alias_info.is_write
        if marked or argument.name in ("running_mean", "running_var"):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += tensors([value])
    return found


@contextlib.contextmanager
def fake_cuda() -> Iterator[None]:
    """Inside, techniques for GPUs act on a CPU: streams and graphs are acted out, other effects left out."""
    with contextlib.ExitStack() as stack:
        for name, value in _FAKES.items():
            stack.enter_context(_replaced(torch.cuda, name, value))
        stack.enter_context(_replaced(torch.Tensor, "pin_memory", lambda tensor: tensor))
        stack.enter_context(_replaced(torch.Tensor, "record_stream", lambda tensor, stream: None))
        for cls in registry.everything():
            everywhere = dataclasses.replace(cls.card, devices=("cpu", "cuda"))
            stack.enter_context(_replaced(cls, "card", everywhere))
        yield


class _Replaced:
    def __init__(self, owner: object, name: str, value: object) -> None:
        self.owner, self.name, self.value = owner, name, value
        self.before = getattr(owner, name)

    def __enter__(self) -> Self:
        setattr(self.owner, self.name, self.value)
        return self

    def __exit__(self, *_: object) -> None:
        setattr(self.owner, self.name, self.before)


_replaced = _Replaced
_FAKES: dict[str, Any] = {
    "CUDAGraph": Graph,
    "graph": lambda graph, **_: graph,
    "graph_pool_handle": lambda: (0, 1),
    "Stream": Stream,
    "Event": Stream,
    "stream": lambda _: contextlib.nullcontext(),
    "current_device": lambda: 0,
    "current_stream": lambda *_: Stream(),
    "set_stream": lambda _: None,
    "synchronize": lambda *_: None,
    "empty_cache": lambda: None,
    "get_device_capability": lambda *_: (9, 0),
}
