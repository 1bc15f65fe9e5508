"""Kernels of torch's own operators on the CPU, exchanged for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vivace.torch_internals import named

_LOST = "no kernel of PyTorch's own can be exchanged"
_destroy = named("torch.library.Library._destroy", lost=_LOST)
_keys = named("torch._C.DispatchKeySet", lost=_LOST)
_key = named("torch._C.DispatchKey", lost=_LOST)


@contextlib.contextmanager
def exchanged(operator: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """On the CPU, ``make(torch's kernel)`` in the place of torch's kernel of an ``aten`` operator.

    It holds in the whole process, so not twice at a time for one operator.
    """
    kernel = torch.library.get_kernel(f"aten::{operator}", "CPU")
    keys = _keys(_key.CPU)

    def own(*arguments: Any, **keywords: Any) -> Any:
        return kernel.call_boxed(keys, *arguments, **keywords)

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl(operator, make(own), "CPU", allow_override=True)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        _destroy(library)
