"""PyTorch's functions that run recurrent layers over the steps of a batch, and others in their place."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from torch import Tensor

from vivace.torch_internals import named

Argument: TypeAlias = Tensor | tuple[Tensor, Tensor] | list[Tensor] | bool | float
_LOST = "recurrent layers cannot be run in another way"
_functions = named("torch._VF", lost=_LOST)
OVER_STEPS: dict[str, Callable[..., Any]] = {
    name: named(f"torch._VF.{name}", lost=_LOST) for name in ("gru", "lstm", "rnn_tanh", "rnn_relu")
}
_acting = threading.local()
_lock, _inside = threading.RLock(), [0]  # a handler of signals may enter too


def _left() -> None:
    """In a process that was forked while other threads were inside, none of them is."""
    global _lock
    _lock = threading.RLock()
    _inside[0] = getattr(_acting, "depth", 0)
    for name in () if _inside[0] else OVER_STEPS:
        vars(_functions).pop(name, None)


os.register_at_fork(after_in_child=_left)


@contextlib.contextmanager
def in_place(others: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Inside, on this thread alone, modules of recurrent layers call these functions, by their names.

    Compilers and exporters know PyTorch's own alone, so these stand there again once no thread is inside.
    """
    with _lock:
        _inside[0] += 1
        vars(_functions).update({name: _chosen(name) for name in OVER_STEPS})
    before = getattr(_acting, "functions", {})
    _acting.functions, _acting.depth = others, getattr(_acting, "depth", 0) + 1
    try:
        yield
    finally:
        _acting.functions, _acting.depth = before, _acting.depth - 1
        with _lock:
            _inside[0] -= 1
            for name in () if _inside[0] else OVER_STEPS:
                vars(_functions).pop(name, None)


def _chosen(name: str) -> Callable[..., Any]:
    own = OVER_STEPS[name]

    def function(*arguments: Argument) -> Any:
        return getattr(_acting, "functions", {}).get(name, own)(*arguments)

    return function
