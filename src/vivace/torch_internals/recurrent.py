"""PyTorch's functions that run recurrent layers over the steps of a batch, and others in their place."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from torch import Tensor

from vivace.torch_internals import named

Argument: TypeAlias = Tensor | list[Tensor] | bool | float
_LOST = "recurrent layers cannot be run in another way"
_functions = named("torch._VF", lost=_LOST)
OVER_STEPS: dict[str, Callable[..., Any]] = {
    name: named(f"torch._VF.{name}", lost=_LOST) for name in ("gru", "rnn_tanh", "rnn_relu")
}
_acting = threading.local()


@contextlib.contextmanager
def in_place(others: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Inside, on this thread alone, modules of recurrent layers call these functions, by their names."""
    for name in others:
        vars(_functions).setdefault(name, _chosen(name))
    before = getattr(_acting, "functions", {})
    _acting.functions = others
    try:
        yield
    finally:
        _acting.functions = before


def _chosen(name: str) -> Callable[..., Any]:
    own = OVER_STEPS[name]

    def function(*arguments: Argument) -> Any:
        return getattr(_acting, "functions", {}).get(name, own)(*arguments)

    return function
