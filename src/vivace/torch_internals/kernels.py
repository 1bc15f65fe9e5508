"""Kernels of torch's own operators on the CPU, exchanged."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from vivace.torch_internals import later

_LOST = "no kernel of PyTorch's own can be exchanged"
_keys = later("torch._C.DispatchKeySet", lost=_LOST)
_key = later("torch._C.DispatchKey", lost=_LOST)
_exchanged: list[Any] = []  # what holds a kernel where it is


def exchange(
    operator: str, make: Callable[[Callable[..., Any]], Callable[..., Any]], *, composite: bool = False
) -> None:
    """On the CPU, ``make(torch's kernel)`` in the place of torch's kernel of an ``aten`` operator.

    One that is `composite` is written in terms of others, which autograd differentiates; what takes its
    place is differentiated in the same way.

    It holds in the whole process and to its end: to take a kernel back while another thread may be in it is
    not safe. Raises Refused where torch lacks what that takes.
    """
    place = "AutogradCPU" if composite else "CPU"
    keys = _keys()(getattr(_key(), place))
    kernel = torch.library.get_kernel(f"aten::{operator}", place)

    def own(*arguments: Any, **keywords: Any) -> Any:
        return kernel.call_boxed(keys, *arguments, **keywords)

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():  # torch says once that a kernel is exchanged
        warnings.filterwarnings("ignore", message="(?s).*[Oo]verriding a previously registered kernel")
        library.impl(operator, make(own), place, allow_override=True)  # type: ignore[no-untyped-call]
    _exchanged.append(library)
