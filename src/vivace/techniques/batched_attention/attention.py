"""Attention by matrix products over many heads at once, and passes of `attention.c` between them."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vivace.mechanisms.c_code import compiled, threads_for
from vivace.operators import LEAST_DROPPED, LEAST_SCORES
from vivace.tensors.precision import FASTER
from vivace.torch_internals.kernels import exchange
from vivace.torch_internals.tensors import is_batched, is_transformed

SOURCE = Path(__file__).with_name("attention.c")
COMPUTED = (torch.float32, torch.bfloat16)
MASKS = {torch.bool: 1, torch.float32: 2, torch.bfloat16: 3}  # as in C
CHUNK = 2**20  # scores that are computed at once: so many stay in a processor's cache
MOST_KEYS = 1024  # with more, PyTorch's kernel, which never holds all scores of a query, is as fast
LEAST_DROPPED_FLOAT = 2**21  # scores of which weights are dropped in float32, below which PyTorch is as fast
COST = 4  # of a score, in numbers of a plain pass
Told = Callable[[int], object]

_beginning = threading.Lock()
_told: list[Told] = []  # while it is empty, torch computes
_exchanged: list[bool] = []


def _unlocked() -> None:
    """In a process that was forked while another thread began, nobody is left who could unlock it."""
    global _beginning
    _beginning = threading.Lock()


os.register_at_fork(after_in_child=_unlocked)


class _Shape(ctypes.Structure):
    """What a pass is given, as in C."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "heads", "queries", "keys", "causal", "kind")),
        ("steps", ctypes.c_int64 * 4),
        ("threads", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("kept", ctypes.c_float),
    )


@dataclasses.dataclass(frozen=True)
class _How:
    """What beside the tensors says how they attend: `dropped` is the share of weights that are dropped."""

    scale: float
    is_causal: bool
    dropped: float


class _Attention(torch.autograd.Function):
    """Queries (batch, heads, queries, width), keys and values (batch, heads, keys, width) to what each query
    attends to; all of one dtype in `COMPUTED`.

    `mask` says which scores count, or what is added to them; `kept` which weights are not dropped. Scores
    are computed again for the gradients, and not kept.
    """

    @staticmethod
    def forward(
        context: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        kept: Tensor | None,
        how: _How,
    ) -> Tensor:
        batch, heads, queries, _ = query.shape
        out = query.new_empty(batch, queries, heads, value.shape[3]).transpose(1, 2)
        if kept is not None:  # as PyTorch's lies in memory then
            out = torch.empty_like(out, memory_format=torch.contiguous_format)
        logs = torch.empty(batch, heads, queries, dtype=torch.float32)
        for part in _parts(query, key):
            q, k, v = (_several(one[part]) for one in (query, key, value))
            scores = torch.bmm(q, k.mT)
            _pass("forward", (scores,), logs[part], mask, kept, part, how)
            out[part] = torch.bmm(scores, v).view(out[part].shape)
        context.save_for_backward(query, key, value, mask, kept, logs)
        context.how = how
        return out

    @staticmethod
    def backward(context: Any, of_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, kept, logs = context.saved_tensors
        if is_batched(of_out) or torch.is_grad_enabled():  # by `is_grads_batched`, or to be differentiated
            return (*_differentiable(context, query, key, value, mask, kept, of_out), None, None, None)
        of_query, of_key, of_value = (
            one.new_empty(one.transpose(1, 2).shape).transpose(1, 2) for one in (query, key, value)
        )
        of_out = of_out.to(query.dtype)
        for part in _parts(query, key):
            q, k, v, of = (_several(one[part]) for one in (query, key, value, of_out))
            scores, gradient = torch.bmm(q, k.mT), torch.bmm(of, v.mT)
            _pass("backward", (scores, gradient), logs[part], mask, kept, part, context.how)
            products = ((of_query, gradient, k), (of_key, gradient.mT, q), (of_value, scores.mT, of))
            for whole, one, other in products:
                whole[part] = torch.bmm(one, other).view(whole[part].shape)
        return of_query, of_key, of_value, None, None, None


def _parts(query: Tensor, key: Tensor) -> Iterator[tuple[slice, slice]]:
    """Samples and heads that are computed at once."""
    batch, heads, queries, _ = query.shape
    a_head = queries * key.shape[2]
    samples, at_once = max(1, CHUNK // (heads * a_head)), max(1, min(heads, CHUNK // a_head))
    for first in range(0, batch, samples):
        for head in range(0, heads, at_once):
            yield slice(first, first + samples), slice(head, head + at_once)


def _several(tensor: Tensor) -> Tensor:
    return tensor.flatten(0, 1).contiguous()


def _pass(
    name: str,
    scores: tuple[Tensor, ...],
    logs: Tensor,
    mask: Tensor | None,
    kept: Tensor | None,
    part: tuple[slice, slice],
    how: _How,
) -> None:
    sizes = (*logs.shape, scores[0].shape[2])
    mask = None if mask is None else mask[part]
    kind, steps = (0, ()) if mask is None else (MASKS[mask.dtype], mask.stride())
    threads = threads_for(COST * scores[0].numel())
    shape = _Shape(*sizes, how.is_causal, kind, (ctypes.c_int64 * 4)(*steps), threads)
    shape.scale, shape.kept = how.scale, 1 / (1 - how.dropped)
    places = map(_place, (*scores, logs, mask, kept if kept is None else kept[part]))
    half = ctypes.c_int64(scores[0].dtype == torch.bfloat16)
    getattr(compiled(SOURCE), name)(*places, half, ctypes.byref(shape))


def _place(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p() if tensor is None else ctypes.c_void_p(tensor.data_ptr())


def _differentiable(
    context: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    kept: Tensor | None,
    of_out: Tensor,
) -> list[Tensor | None]:
    """The gradients by operators of which autograd keeps how they were made."""
    how, needs = context.how, context.needs_input_grad[:3]
    with torch.enable_grad():
        scores = query.float() @ key.float().mT * how.scale
        if how.is_causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.where(mask, 0.0, float("-inf"))
        weights = torch.softmax(scores if mask is None else scores + mask, -1)
        if mask is not None:
            weights = torch.where((scores + mask == float("-inf")).all(-1, keepdim=True), 0.0, weights)
        if kept is not None:
            weights = weights * kept / (1 - how.dropped)
        out = (weights @ value.float()).to(query.dtype)
        wanted = [one for one, asked in zip((query, key, value), needs, strict=True) if asked]
        given = iter(torch.autograd.grad(out, wanted, of_out, create_graph=True, allow_unused=True))
    return [next(given) if asked else None for asked in needs]


def _instead(own: Callable[..., Any]) -> Callable[..., Any]:
    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        suits = (
            bool(_told) and _suits(query, key, value, dropout_p) and not (is_causal and attn_mask is not None)
        )
        mask = None
        if suits and attn_mask is not None:
            sizes = (*query.shape[:3], key.shape[2])
            suits = _masks(attn_mask, sizes, query.dtype)
            mask = attn_mask.expand(sizes) if suits else None
        if not suits:
            return own(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        kept = None
        if dropout_p:  # by the same numbers as PyTorch's
            kept = torch.empty(*query.shape[:3], key.shape[2], dtype=torch.bool).bernoulli_(1 - dropout_p)
        how = _How(query.shape[3] ** -0.5 if scale is None else scale, is_causal, dropout_p)
        found = _Attention.apply(query, key, value, mask, kept, how)  # type: ignore[no-untyped-call]
        for each in tuple(_told):
            each(query[..., 0].numel() * key.shape[2])
        return found

    return attention


def _suits(query: Tensor, key: Tensor, value: Tensor, dropped: float) -> bool:
    """Can they attend here: on the CPU, in training, with enough scores and not too many keys?"""
    given = (query, key, value)
    if not all(type(one) in (Tensor, nn.Parameter) and one.dim() == 4 for one in given):
        return False
    suits = query.dtype in COMPUTED and query.dtype == key.dtype == value.dtype
    suits = suits and torch.is_grad_enabled() and any(one.requires_grad for one in given)
    suits = suits and query.shape[:2] == key.shape[:2] == value.shape[:2] and key.shape[2] == value.shape[2]
    suits = suits and query.shape[3] == key.shape[3] and key.shape[2] <= MOST_KEYS and 0 <= dropped < 1
    suits = suits and query.shape[3] * value.shape[3] > 0
    scores, half = query[..., 0].numel() * key.shape[2], query.dtype == torch.bfloat16
    suits = suits and _pays(scores, dropped, half)
    if not suits or any(one.device.type != "cpu" or one.is_neg() for one in given):
        return False
    # A mode may give tensors without memory where none went in.
    return not is_transformed() and type(torch.empty(0)) is Tensor


def _pays(scores: int, dropped: float, half: bool) -> bool:
    """Is PyTorch's way slower for so many scores?"""
    if not dropped:
        return half and scores >= LEAST_SCORES
    return scores >= (LEAST_DROPPED if half else LEAST_DROPPED_FLOAT)


def _takes(query: Tensor, key: Tensor) -> bool:
    """Is it faster here in half precision than in PyTorch's kernel in float32?"""
    suits = bool(_told) and torch.is_grad_enabled() and query.dim() == 4 and key.shape[2] <= MOST_KEYS
    return suits and _pays(query[..., 0].numel() * key.shape[2], 0.0, half=True)


def _masks(mask: Tensor, sizes: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Is it a mask of so many scores that C code can read, and that takes no gradient?"""
    last = sizes[len(sizes) - mask.dim() :] if mask.dim() <= len(sizes) else None
    suits = type(mask) is Tensor and last is not None and mask.dtype in (torch.bool, dtype)
    suits = suits and not mask.requires_grad and mask.device.type == "cpu" and not mask.is_neg()
    return suits and all(size in (1, wanted) for size, wanted in zip(mask.shape, last or (), strict=True))


def begin(told: Told) -> Callable[[], None]:
    """Attend here, in the whole process, until what this returns is called, by all who have begun.

    `told` gets how many scores each call has. Raises Refused where torch's operator cannot be exchanged, and
    OSError where the code cannot be compiled.
    """
    compiled(SOURCE)
    with _beginning:
        if not _exchanged:
            exchange("scaled_dot_product_attention", _instead, composite=True)
            FASTER.append(_takes)
            _exchanged.append(True)
        _told.append(told)
    return partial(_told.remove, told)
