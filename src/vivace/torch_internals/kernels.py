"""Kernels of torch's own operators on the CPU, exchanged for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vivace.torch_internals import later

_LOST = "no kernel of PyTorch's own can be exchanged"
_destroy = later("torch.library.Library._destroy", lost=_LOST)
_keys = later("torch._C.DispatchKeySet", lost=_LOST)
_key = later("torch._C.DispatchKey", lost=_LOST)


@contextlib.contextmanager
def exchanged(operator: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """On the CPU, ``make(torch's kernel)`` in the place of torch's kernel of an ``aten`` operator.

    It holds in the whole process, so not twice at a time for one operator. Raises Refused where torch lacks
    what that takes.
    """
    destroy, keys = _destroy(), _keys()(_key().CPU)
    kernel = torch.library.get_kernel(f"aten::{operator}", "CPU")

    def own(*arguments: Any, **keywords: Any) -> Any:
        return kernel.call_boxed(keys, *arguments, **keywords)

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        library.impl(operator, make(own), "CPU", allow_override=True)  # type: ignore[no-untyped-call]
        yield
    finally:
        destroy(library)
