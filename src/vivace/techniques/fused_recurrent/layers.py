"""Recurrent layers over all steps of a batch: a product and a pass of `cells.c` a step, the rest at once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from vivace.mechanisms.c_code import compiled, threads_for
from vivace.torch_internals.recurrent import OVER_STEPS, Argument
from vivace.torch_internals.tensors import is_batched, is_transformed

SOURCE = Path(__file__).with_name("cells.c")
KINDS = {"gru": 0, "rnn_tanh": 1, "rnn_relu": 2}  # as in C
COMPUTED = (torch.float32, torch.bfloat16)
COST = 4  # of a unit, in numbers of a plain pass
FEWEST_STEPS = 4  # of fewer, as where a decoder is called step by step, there is nothing to gain


class _Layer(torch.autograd.Function):
    """One layer in one direction: inputs (steps, batch, features) to states (steps, batch, width), and to the
    last state (batch, width).

    Inputs, weights and biases are of one dtype in `COMPUTED`, in which the states are handed on; within the
    layer they are float32, and so is the last one.
    """

    @staticmethod
    def forward(
        context: Any,
        kind: str,
        backwards: bool,
        x: Tensor,
        first: Tensor,
        of_input: Tensor,
        of_state: Tensor,
        input_bias: Tensor | None,
        state_bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        steps, batch, _ = x.shape
        width, gates = of_state.shape[1], len(of_state)
        given = _product(x.flatten(0, 1), of_input.t(), input_bias).view(steps, batch, gates)
        states = x.new_empty(steps + 1, batch, width)  # the first one, and what each step makes of it
        states[-1 if backwards else 0].copy_(first)
        kept = x.new_empty(steps, batch, 4 * width if kind == "gru" else 0)
        before, out = (states[1:], states[:-1]) if backwards else (states[:-1], states[1:])
        last, recurrent, across = _changeable(first), x.new_empty(batch, gates), of_state.t()
        step = _cell("forward", kind, (batch, width), x.dtype)
        rows = before.unbind(0)
        for at in reversed(range(steps)) if backwards else range(steps):
            _product(rows[at], across, state_bias, out=recurrent)
            step(_at(given, at), _at(recurrent), _at(last), _at(out, at), _at(kept, at))
        context.how = kind, backwards
        context.save_for_backward(x, first, of_input, of_state, input_bias, state_bias, states, kept)
        return out, last

    @staticmethod
    def backward(context: Any, of_out: Tensor, of_last: Tensor) -> tuple[Tensor | None, ...]:
        x, first, of_input, of_state, input_bias, state_bias, states, kept = context.saved_tensors
        kind, backwards = context.how
        many = is_batched(of_out) or is_batched(of_last)  # by `is_grads_batched`
        if many or torch.is_grad_enabled():  # or these gradients are to be differentiated in turn
            inputs = (x, first, of_input, of_state, input_bias, state_bias)
            return (None, None, *_differentiable(context, inputs, (of_out, of_last)))
        steps, batch, width = len(x), x.shape[1], of_state.shape[1]
        before, out = (states[1:], states[:-1]) if backwards else (states[:-1], states[1:])
        of_out, state = of_out.to(x.dtype).contiguous(), _changeable(of_last)
        of_given = x.new_empty(steps, batch, len(of_state))
        of_recurrent = torch.empty_like(of_given) if kind == "gru" else of_given
        back, seen = torch.zeros_like(states[0]), before if kind == "gru" else out
        step = _cell("backward", kind, (batch, width), x.dtype)
        rows = of_recurrent.unbind(0)
        for at in range(steps) if backwards else reversed(range(steps)):
            places = (_at(of_out, at), _at(state), _at(back), _at(seen, at), _at(kept, at))
            step(*places, _at(of_given, at), _at(of_recurrent, at))
            torch.mm(rows[at], of_state, out=back)
        given, recurrent = of_given.flatten(0, 1), of_recurrent.flatten(0, 1)
        wanted = context.needs_input_grad[2:]
        return (
            None,
            None,
            (given @ of_input).view_as(x) if wanted[0] else None,
            (state + back).to(first.dtype) if wanted[1] else None,
            given.t() @ x.flatten(0, 1) if wanted[2] else None,
            recurrent.t() @ before.flatten(0, 1) if wanted[3] else None,
            given.sum(0, dtype=torch.float32).to(x.dtype) if wanted[4] else None,
            recurrent.sum(0, dtype=torch.float32).to(x.dtype) if wanted[5] else None,
        )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    if bias is None:
        return torch.mm(x, weight, out=out)
    return torch.addmm(bias, x, weight, out=out)


def _changeable(state: Tensor) -> Tensor:
    """A copy in float32, row after row, however the state lies."""
    return state.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def _at(tensor: Tensor, step: int = 0) -> ctypes.c_void_p:
    """Where its part of a step begins, or where it begins itself."""
    return ctypes.c_void_p(tensor.data_ptr() + step * tensor.stride(0) * tensor.element_size())


def _cell(name: str, kind: str, sizes: Sequence[int], dtype: torch.dtype) -> Callable[..., None]:
    function = getattr(compiled(SOURCE), name)
    numbers = (*sizes, KINDS[kind], int(dtype == torch.bfloat16), threads_for(COST * sizes[0] * sizes[1]))
    further = tuple(map(ctypes.c_int64, numbers))

    def step(*places: ctypes.c_void_p) -> None:
        function(*places, *further)

    return step


def _differentiable(
    context: Any, inputs: Sequence[Tensor], gradients: Sequence[Tensor]
) -> list[Tensor | None]:
    """The gradients by PyTorch's own layer, which keeps how it made them."""
    kind, backwards = context.how
    x, first, *weights = inputs
    weights = [weight for weight in weights if weight is not None]
    with torch.enable_grad():
        order = x.flip(0) if backwards else x
        options = (len(weights) == 4, 1, 0.0, True, False, False)
        out, last = OVER_STEPS[kind](order, first.to(x.dtype)[None], weights, *options)
        found = (out.flip(0) if backwards else out, last[0].float())
        wanted = [one for one, asked in zip(inputs, context.needs_input_grad[2:], strict=True) if asked]
        given = iter(torch.autograd.grad(found, wanted, gradients, create_graph=True, allow_unused=True))
    return [next(given) if asked else None for asked in context.needs_input_grad[2:]]


def over_steps(
    kind: str,
    told: Callable[[], object],
    x: Tensor,
    first: Tensor,
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor] | None:
    """What ``torch._VF.gru`` (or an RNN's) of these arguments gives; None where this is not for it."""
    tensors = [x, first, *weights]
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    kinds = {one.dtype for one in tensors}
    suits = train and torch.is_grad_enabled() and x.dim() == 3 and dtype in COMPUTED
    suits = suits and (kinds <= set(COMPUTED) if torch.is_autocast_enabled("cpu") else len(kinds) == 1)
    suits = suits and all(one.device.type == "cpu" for one in tensors) and not is_transformed()
    if suits:  # a mode may give tensors without memory where none went in
        suits = all(type(one) in (Tensor, nn.Parameter) for one in (*tensors, x.new_empty(0)))
    if not suits or x.shape[1 if batch_first else 0] < FEWEST_STEPS or not x.numel():
        return None
    inputs = (x.transpose(0, 1) if batch_first else x).to(dtype).contiguous()
    cast = [weight.to(dtype) for weight in weights]
    directions, each = 1 + bidirectional, 4 if has_biases else 2
    lasts = []
    for layer in range(num_layers):
        found = []
        for direction in range(directions):
            place = layer * directions + direction
            own = [*cast[each * place : each * (place + 1)], None, None][:4]
            out, last = _Layer.apply(kind, direction == 1, inputs, first[place], *own)  # type: ignore[no-untyped-call]
            found.append(out)
            lasts.append(last)
        inputs = torch.cat(found, -1) if bidirectional else found[0]
        if dropout and layer < num_layers - 1:
            inputs = torch.dropout(inputs, dropout, train)
    told()
    result = first.dtype if kind == "gru" else dtype  # as PyTorch gives it under autocast
    out = inputs.to(result, copy=not bidirectional)  # a view until here, which nobody could change in place
    return (out.transpose(0, 1) if batch_first else out), torch.stack(lasts).to(result)


def in_place_of(kind: str, told: Callable[[], object]) -> Callable[..., Any]:
    """What stands in the place of PyTorch's function for a kind of layers, while a module of it runs."""
    own = OVER_STEPS[kind]

    def function(*arguments: Argument) -> Any:
        # With the numbers of sequences of each step behind the data it is a packed batch.
        packed = len(arguments) > 1 and not isinstance(arguments[3], bool)
        found = None if packed else over_steps(kind, told, *cast("Any", arguments))
        return own(*arguments) if found is None else found

    return function
