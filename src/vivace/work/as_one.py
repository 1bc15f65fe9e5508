"""Recurrent layers, attention and dropout as the one kernel of a GPU, where tensors are shapes only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from vivace.tensors.trees import map_tensors
from vivace.work.formulas import of_causal

Add: TypeAlias = Callable[[str, str, int, Sequence[torch.Tensor], Sequence[torch.Tensor]], None]
"""Notes a kernel: its kind, name, operations, what it reads and what it writes."""

# Of a recurrent layer, numbers that its backward pass needs of a step of a sample, for each row of weights:
# the gates, and of an LSTM the cell and the state, of a GRU the candidate's part of the state and the state.
KEPT_A_ROW = {"lstm": 6 / 4, "gru": 5 / 3, "rnn_tanh": 1.0, "rnn_relu": 1.0}


class RecurrentAsOneKernel(TorchFunctionMode):
    """Recurrent layers as one kernel where there is no device to run (or refuse) one; `add` notes it."""

    def __init__(self, add: Add) -> None:
        super().__init__()
        self._add = add

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in KEPT_A_ROW and isinstance(args[2], (list, tuple)) and _imagined(args[:1]):
            return self._recurrent(name, *args)
        return func(*args, **(kwargs or {}))

    def _recurrent(
        self,
        name: str,
        inputs: torch.Tensor,
        states: torch.Tensor | Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        *settings: object,
    ) -> Any:
        """The padded form of torch._VF.lstm and its kin: settings are bias, layers, dropout, training,
        bidirectional, batch_first."""
        initial = (states,) if isinstance(states, torch.Tensor) else tuple(states)
        device = inputs.device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            half = torch.get_autocast_dtype(device)
            inputs, initial, weights = map_tensors((inputs, initial, weights), lambda t: t.to(half))
        output = _Fused.apply(self._add, name, inputs, settings[4], settings[5], *initial, *weights)
        last = tuple(state + output.sum() * 0 for state in initial)
        return (output, *last)


class AsOneKernel(RecurrentAsOneKernel):
    """Attention and dropout, too."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") == "scaled_dot_product_attention" and _imagined(args[:3]):
            return _attended(self._add, *args, **(kwargs or {}))
        if func is functional.dropout and _imagined(args[:1]):
            return _dropout(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    @contextlib.contextmanager
    def attention(self) -> Iterator[None]:
        """Catch attention inside of functions that a mode sees only whole, such as multi-head attention."""
        original = functional.scaled_dot_product_attention

        def attend(*args: Any, **kwargs: Any) -> Any:
            if len(args) >= 3 and _imagined(args[:3]):
                return _attended(self._add, *args, **kwargs)
            return original(*args, **kwargs)

        functional.scaled_dot_product_attention = attend
        try:
            yield
        finally:
            functional.scaled_dot_product_attention = original


class _Fused(torch.autograd.Function):
    """One kernel forward and one backward, of which only the shapes exist."""

    @staticmethod
    def forward(ctx: Any, add: Add, name: str, first: torch.Tensor, *rest: object) -> torch.Tensor:
        """Count the kernel and make its output; see `AsOneKernel` for the arguments."""
        others = [other for other in rest if isinstance(other, torch.Tensor)]
        kept: list[torch.Tensor] = []
        if name == "attention":
            key, value = others[0], others[1]
            output = first.new_empty(*first.shape[:-1], value.shape[-1])
            flops = 2 * first.shape[:-1].numel() * key.shape[-2] * (first.shape[-1] + value.shape[-1])
            flops = of_causal(flops, first.shape[-2], key.shape[-2]) if rest[2] else flops
        else:
            flops = 2 * first.shape[:-1].numel() * sum(w.numel() for w in others if w.dim() == 2)
            width = others[0].shape[-1] * (2 if rest[0] else 1)
            output = first.new_empty(*first.shape[:-1], width)
            rows = sum(w.shape[0] for w in others if w.dim() == 2) // 2  # half of them meet the state before
            kept = [first.new_empty(*first.shape[:-1], int(rows * KEPT_A_ROW[name]))]
        kind = name if name == "attention" else "recurrent"
        add(kind, name, flops, [first, *others], [output])
        ctx.add, ctx.kind, ctx.name, ctx.flops = add, kind, name, flops
        ctx.save_for_backward(first, *others, output, *kept)
        ctx.num_inputs = 1 + len(others)
        ctx.places = [isinstance(other, torch.Tensor) for other in rest]
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Twice the forward's operations; attention two and a half times, as it computes the scores anew."""
        inputs, output = ctx.saved_tensors[: ctx.num_inputs], ctx.saved_tensors[ctx.num_inputs]
        results = [torch.empty_like(tensor) for tensor in inputs]
        flops = int(ctx.flops * (2.5 if ctx.kind == "attention" else 2))
        ctx.add(ctx.kind, f"{ctx.name}_backward", flops, [*inputs, output, *gradients], results)
        rest = iter(results[1:])
        return (None, None, results[0], *(next(rest) if place else None for place in ctx.places))


def _attended(
    add: Add,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **_: object,
) -> Any:
    """Scaled dot product attention as one kernel."""
    return _Fused.apply(add, "attention", query, key, value, is_causal)


def _dropout(
    tensor: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """Dropout as the one kernel that a GPU runs."""
    return torch.native_dropout(tensor, p, True)[0] if training and p > 0 else tensor


def _imagined(tensors: Iterable[Any]) -> bool:
    """Has a tensor a shape only: on the meta device, or fake?"""
    return any(isinstance(t, torch.Tensor) and (t.is_meta or hasattr(t, "fake_mode")) for t in tensors)
