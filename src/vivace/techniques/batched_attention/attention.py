"""Attention by matrix products over many heads at once, and passes of `attention.c` between them."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vivace.mechanisms.c_code import compiled, threads_for
from vivace.mechanisms.exchanged import Exchanged
from vivace.operators import LEAST_DROPPED, LEAST_DROPPED_FLOAT, LEAST_SCORES, MOST_KEYS
from vivace.tensors.precision import FASTER
from vivace.torch_internals.kernels import exchange
from vivace.torch_internals.tensors import is_batched, is_transformed

SOURCE = Path(__file__).with_name("attention.c")
COMPUTED = (torch.float32, torch.bfloat16)
MASKS = {torch.bool: 1, torch.float32: 2, torch.bfloat16: 3}  # as in C
CHUNK = 2**20  # scores that are computed at once: so many stay in a processor's cache
COST = 4  # of a score, in numbers of a plain pass
Told = Callable[[int], object]


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
        out = query.new_empty(batch, heads, queries, value.shape[3])
        dense = all(one.stride(3) == 1 for one in (query, key, value))
        if kept is None and dense and query.shape == out.shape:  # PyTorch's kernel would have made it
            out = torch.empty_like(query)
        # Each two floats, which who keeps float32 tensors in fewer bits leaves alone.
        sums = query.new_empty(batch, heads, queries, dtype=torch.int64)
        for part in _parts(query, key):
            q, k, v = (_several(one[part]) for one in (query, key, value))
            scores = torch.bmm(q, k.mT)
            weights = torch.empty_like(scores)  # a mode may keep the products, as checkpoints of some do
            _pass("forward", (scores, weights), sums[part], mask, kept, part, how)
            out[part] = torch.bmm(weights, v).view(out[part].shape)
        context.save_for_backward(query, key, value, mask, kept, sums)
        context.how = how
        return out

    @staticmethod
    def backward(context: Any, of_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, kept, sums = context.saved_tensors
        # Hooks may have saved them in another order.
        kept, sums = kept if kept is None else kept.contiguous(), sums.contiguous()
        if is_batched(of_out) or torch.is_grad_enabled():  # by `is_grads_batched`, or to be differentiated
            return (*_differentiable(context, query, key, value, mask, kept, of_out), None, None, None)
        of_query, of_key, of_value = (
            one.new_empty(one.transpose(1, 2).shape).transpose(1, 2) for one in (query, key, value)
        )
        of_out = of_out.to(query.dtype)
        with torch.autocast("cpu", enabled=False):  # it may be on here, and to another type
            for part in _parts(query, key):
                q, k, v, of = (_several(one[part]) for one in (query, key, value, of_out))
                scores, gradient = torch.bmm(q, k.mT), torch.bmm(of, v.mT)
                _pass("backward", (scores, gradient), sums[part], mask, kept, part, context.how)
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
    scores: tuple[Tensor, Tensor],
    sums: Tensor,
    mask: Tensor | None,
    kept: Tensor | None,
    part: tuple[slice, slice],
    how: _How,
) -> None:
    sizes = (*sums.shape, scores[0].shape[2])
    mask = None if mask is None else mask[part]
    kind, steps = (0, ()) if mask is None else (MASKS[mask.dtype], mask.stride())
    threads = threads_for(COST * scores[0].numel())
    shape = _Shape(*sizes, how.is_causal, kind, (ctypes.c_int64 * 4)(*steps), threads)
    shape.scale, shape.kept = how.scale, 1 / (1 - how.dropped)
    places = map(_place, (*scores, sums, mask, kept if kept is None else kept[part]))
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
        query, key, value = (one.view_as(one) for one in (query, key, value))  # one may come of another
        scores = query.float() @ key.float().mT * how.scale
        if how.is_causal:
            mask = torch.ones_like(scores[0, 0], dtype=torch.bool).tril()
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.where(mask, 0.0, float("-inf"))
        scores = scores if mask is None else scores + mask
        nothing = (scores == float("-inf")).all(-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(nothing, 0.0), -1).masked_fill(nothing, 0.0)
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
        suits = _suits(query, key, value, attn_mask, dropout_p) and not (is_causal and attn_mask is not None)
        if not suits:
            return own(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        sizes = (*query.shape[:3], key.shape[2])
        mask, kept = attn_mask, None
        if dropout_p:  # by the same numbers as PyTorch's, which keeps no mask then: it may be changed later
            mask = mask if mask is None else mask.clone()
            kept = query.new_empty(sizes, dtype=torch.bool).bernoulli_(1 - dropout_p)
        how = _How(query.shape[3] ** -0.5 if scale is None else scale, is_causal, dropout_p)
        spread = mask if mask is None else mask.expand(sizes)
        found = _Attention.apply(query, key, value, spread, kept, how)  # type: ignore[no-untyped-call]
        _ours.tell(math.prod(sizes))
        return found

    return attention


def _suits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropped: float) -> bool:
    """Can they attend here, and is PyTorch's way slower?"""
    given = (query, key, value)
    half, same = query.dtype == torch.bfloat16, query.dtype == key.dtype == value.dtype
    if not _ours.told or not same or query.dtype not in COMPUTED or not _fits(*given, mask, dropped, half):
        return False
    if mask is not None and mask.dtype not in (torch.bool, torch.float32, query.dtype):
        return False
    tensors = given if mask is None else (*given, mask)
    if any(one.device.type != "cpu" or one.is_neg() or one.is_inference() for one in tensors):
        return False
    # A mode may give tensors without memory where none went in.
    return not is_transformed() and type(torch.empty(0)) is Tensor


def _takes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Are they faster here, once they are in bfloat16, than in PyTorch's kernel in float32?"""
    fits = bool(_ours.told) and _fits(query, key, value, mask, 0.0, half=True)
    return fits and query.shape[:3].numel() * key.shape[2] >= LEAST_DROPPED


def _fits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropped: float, half: bool) -> bool:
    """Are they of sizes that are faster here, and for gradients, of which the mask needs none?"""
    given = (query, key, value)
    if not all(type(one) in (Tensor, nn.Parameter) and one.dim() == 4 for one in given):
        return False
    (batch, heads, queries, width), keys = query.shape, key.shape[2]
    suits = torch.is_grad_enabled() and any(one.requires_grad for one in given)
    suits = suits and key.shape == (batch, heads, keys, width) and value.shape[:3] == (batch, heads, keys)
    suits = suits and width * value.shape[3] > 0 and keys <= MOST_KEYS and queries * keys <= MOST_KEYS**2
    if not suits or not 0 <= dropped < 1:
        return False
    if mask is not None:
        sizes = query.shape[:3] + key.shape[2:3]
        suits = (
            type(mask) is Tensor and mask.dim() in (2, 4) and mask.dtype in MASKS and not mask.requires_grad
        )
        fits = suits and all(map(_spreads, mask.shape, sizes[-mask.dim() :]))
        if not fits:
            return False
    scores = batch * heads * queries * keys
    if dropped:
        return scores >= (LEAST_DROPPED if half else LEAST_DROPPED_FLOAT)
    # A person may have switched off the kernel in whose place this would be.
    on: bool = torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
    return on and half and scores >= LEAST_SCORES


def _spreads(size: int, wanted: int) -> bool:
    return size in (1, wanted)


def begin(told: Told) -> Callable[[], None]:
    """Attend here, in the whole process, until what this returns is called, by all who have begun.

    `told` gets how many scores each call has. Raises Refused where torch's operator cannot be exchanged, and
    OSError where the code cannot be compiled.
    """
    compiled(SOURCE)
    return _ours.begin(told)


def _put() -> None:
    exchange("scaled_dot_product_attention", _instead, composite=True)
    FASTER.append(_takes)


_ours = Exchanged(_put)
