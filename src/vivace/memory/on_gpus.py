"""Operators in the form that a GPU runs, where a step for one is followed on the operators of a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from vivace.tensors.precision import ON_CPUS

_attend_here = functional.scaled_dot_product_attention
_drop_here = functional.dropout


@contextlib.contextmanager
def as_on_gpus() -> Iterator[None]:
    """Inside, attention with dropout keeps no scores, dropout keeps a byte for each number, and no LayerNorm
    computes in fp32 for the sake of a CPU's sums.

    Functions are replaced in `torch.nn.functional`, of whose own a mode sees no inside, and where they are
    called by another name.
    """
    own: tuple[Any, Any] = (_attend, _drop)
    functional.scaled_dot_product_attention, functional.dropout = own
    on_cpus = dict(ON_CPUS)
    ON_CPUS.clear()
    try:
        with _OnGpus():
            yield
    finally:
        ON_CPUS.update(on_cpus)
        functional.scaled_dot_product_attention, functional.dropout = _attend_here, _drop_here


class _OnGpus(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _OWN.get(func, func)(*args, **(kwargs or {}))


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **more: Any,
) -> torch.Tensor:
    """Without dropout, for which a GPU's fused kernels keep a seed and a CPU has none.

    The kernel for float32 puts heads beside each other, whatever the order of its inputs is in memory.
    """
    attended: torch.Tensor = _attend_here(query, key, value, attn_mask, 0.0, is_causal, **more)
    by_head = query.dtype == torch.float32 and query.dim() == 4
    return attended.transpose(1, 2).contiguous().transpose(1, 2) if by_head else attended


def _drop(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """A GPU's own form, which is chosen by the device inside of torch."""
    if inplace or not training or not 0.0 < p < 1.0:
        return _drop_here(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


_OWN: dict[Callable[..., Any], Callable[..., Any]] = {_attend_here: _attend, torch.dropout: _drop}
