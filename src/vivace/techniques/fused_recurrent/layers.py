"""Recurrent layers over all steps of a batch: a product and a pass of `cells.c` a step, the rest at once."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from vivace.mechanisms.c_code import compiled, threads_for
from vivace.torch_internals.recurrent import OVER_STEPS, Argument
from vivace.torch_internals.tensors import is_batched, is_transformed

SOURCE = Path(__file__).with_name("cells.c")
KINDS = {"gru": 0, "rnn_tanh": 1, "rnn_relu": 2, "lstm": 3}  # as in C
GATES = {"gru": 3, "lstm": 4}
KEPT = {"gru": 4, "lstm": 5}  # numbers of a unit that a step keeps for its gradients
COMPUTED = (torch.float32, torch.bfloat16)
COST = 4  # of a unit, in numbers of a plain pass
FEWEST_STEPS = 4  # of fewer, as where a decoder is called step by step, there is nothing to gain


@dataclasses.dataclass(frozen=True)
class _Steps:
    """How many sequences have each step: the longest ones lie first, as in a packed batch."""

    counts: tuple[int, ...]

    @functools.cached_property
    def starts(self) -> list[int]:
        """Where the rows of each step begin, and where the last ones end."""
        return [0, *itertools.accumulate(self.counts)]

    def before(self, states: Tensor, backwards: bool) -> Tensor:
        """Of each row the state before its step: a view where all sequences are of one length.

        `states` are the first ones and those of all steps behind them; backwards, in front of them.
        """
        batch, total = self.counts[0], sum(self.counts)
        if batch == self.counts[-1]:
            return states[batch:] if backwards else states[:total]
        counts, starts = torch.tensor([*self.counts, 0]), torch.tensor(self.starts)
        step = torch.arange(len(self.counts)).repeat_interleave(counts[:-1])
        row = torch.arange(total) - starts[step]
        if backwards:  # where the next step has no such row, its sequence begins here
            return states[row + torch.where(row < counts[step + 1], starts[step + 1], total)]
        return states[row + torch.where(step > 0, batch + starts[step - 1], 0)]


class _Layer(torch.autograd.Function):
    """One layer in one direction: inputs (rows of all steps, features) to states (rows, width), and to the
    last state of each sequence (batch, width); of an LSTM also to the cell's.

    Inputs, weights and biases are of one dtype in `COMPUTED`, in which the states are handed on; within the
    layer they are float32, and so are the last ones.
    """

    @staticmethod
    def forward(
        context: Any,
        how: tuple[str, bool, _Steps],
        x: Tensor,
        first: Tensor,
        first_cell: Tensor | None,
        of_input: Tensor,
        of_state: Tensor,
        input_bias: Tensor | None,
        state_bias: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        kind, backwards, steps = how
        total, batch, (gates, width) = len(x), steps.counts[0], of_state.shape
        given = _product(x, of_input.t(), input_bias)
        states = x.new_empty(batch + total, width)
        begin, out = (states[total:], states[:total]) if backwards else (states[:batch], states[batch:])
        begin.copy_(first)
        kept = x.new_empty(total, KEPT.get(kind, 0) * width)
        last, recurrent, across = _changeable(first), x.new_empty(batch, gates), of_state.t()
        cell = None if first_cell is None else _changeable(first_cell)
        step, before = _cell("forward", kind, width, x.dtype), begin
        outs = torch.split(out, list(steps.counts))
        for at in _in_turn(steps, backwards):
            start, count = steps.starts[at], steps.counts[at]
            if len(before) < count:  # backwards, a longer sequence begins before a shorter one
                before = torch.cat((before, begin[len(before) : count]))
            before = before[:count]
            _product(before, across, state_bias, out=recurrent[:count])
            read, written = (_at(given, start), _at(recurrent)), (_at(out, start), _at(kept, start))
            step(count, *read, _at(last), _at(cell), *written)
            before = outs[at]
        context.how = how
        context.save_for_backward(
            x, first, first_cell, of_input, of_state, input_bias, state_bias, states, kept
        )
        return out, last, cell

    @staticmethod
    def backward(
        context: Any, of_out: Tensor, of_last: Tensor, of_cell: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        *inputs, states, kept = context.saved_tensors
        states, kept = states.contiguous(), kept.contiguous()  # hooks may have saved them in another order
        x, first, first_cell, of_input, of_state, _, _ = inputs
        kind, backwards, steps = context.how
        gradients = [of_out, of_last] if of_cell is None else [of_out, of_last, of_cell]
        many = any(map(is_batched, gradients))  # by `is_grads_batched`
        if many or torch.is_grad_enabled():  # or these gradients are to be differentiated in turn
            return (None, *_differentiable(context, inputs, gradients))
        before = steps.before(states, backwards)
        seen = before if kind == "gru" else states[: len(x)] if backwards else states[steps.counts[0] :]
        of_out, state = of_out.to(x.dtype).contiguous().resolve_neg(), _changeable(of_last)
        cell = None if of_cell is None else _changeable(of_cell)
        given = x.new_empty(len(x), len(of_state))
        recurrent = torch.empty_like(given) if kind == "gru" else given
        back, rows = torch.zeros_like(state, dtype=x.dtype), torch.split(recurrent, list(steps.counts))
        step = _cell("backward", kind, of_state.shape[1], x.dtype)
        for at in _in_turn(steps, not backwards):
            start, count = steps.starts[at], steps.counts[at]
            read = _at(of_out, start), _at(state), _at(cell), _at(back), _at(seen, start), _at(kept, start)
            step(count, *read, _at(given, start), _at(recurrent, start))
            torch.mm(rows[at], of_state, out=back[:count])
        wanted = context.needs_input_grad[1:]
        return (
            None,
            given @ of_input if wanted[0] else None,
            (state + back).to(first.dtype) if wanted[1] else None,
            cell.to(first_cell.dtype) if wanted[2] and cell is not None else None,
            given.t() @ x if wanted[3] else None,
            recurrent.t() @ before if wanted[4] else None,
            given.sum(0) if wanted[5] else None,  # its sums are float32 within
            recurrent.sum(0) if wanted[6] else None,
        )


def _in_turn(steps: _Steps, backwards: bool) -> Iterable[int]:
    numbers = range(len(steps.counts))
    return reversed(numbers) if backwards else numbers


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    if bias is None:
        return torch.mm(x, weight, out=out)
    return torch.addmm(bias, x, weight, out=out)


def _changeable(state: Tensor) -> Tensor:
    """A copy in float32, row after row, however the state lies."""
    return state.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def _at(tensor: Tensor | None, row: int = 0) -> ctypes.c_void_p:
    """Where that row of it lies; of what is not there, nowhere."""
    if tensor is None:
        return ctypes.c_void_p()
    return ctypes.c_void_p(tensor.data_ptr() + row * tensor.stride(0) * tensor.element_size())


def _cell(name: str, kind: str, width: int, dtype: torch.dtype) -> Callable[..., None]:
    function = getattr(compiled(SOURCE), name)

    @functools.cache
    def numbers(count: int) -> tuple[ctypes.c_int64, ...]:
        those = (count, width, KINDS[kind], int(dtype == torch.bfloat16), threads_for(COST * count * width))
        return tuple(map(ctypes.c_int64, those))

    def step(count: int, *places: ctypes.c_void_p) -> None:
        function(*places, *numbers(count))

    return step


def _differentiable(
    context: Any, inputs: Sequence[Tensor | None], gradients: Sequence[Tensor]
) -> list[Tensor | None]:
    """The gradients by PyTorch's own layer, which keeps how it made them."""
    kind, backwards, steps = context.how
    x, first, first_cell, *weights = cast("list[Tensor]", inputs)
    directions = 2 if backwards else 1  # it has no layer that goes backwards alone
    own = [weight for weight in weights if weight is not None] * directions
    with torch.enable_grad():
        both = (first, first_cell)[: len(gradients) - 1]
        firsts = [one.to(x.dtype).expand(directions, *one.shape) for one in both]
        begin = tuple(firsts) if kind == "lstm" else firsts[0]
        options = (weights[-1] is not None, 1, 0.0, True, backwards)
        out, *lasts = OVER_STEPS[kind](x, torch.tensor(steps.counts), begin, own, *options)
        found = [out[:, -first.shape[1] :], *(last[-1].float() for last in lasts)]
        needs = context.needs_input_grad[1:]
        wanted = [one for one, asked in zip(inputs, needs, strict=True) if asked and one is not None]
        given = iter(torch.autograd.grad(found, wanted, gradients, create_graph=True, allow_unused=True))
    return [next(given) if asked else None for asked in needs]


def over_steps(
    kind: str,
    told: Callable[[], object],
    x: Tensor,
    counts: Tensor | None,
    first: Tensor | tuple[Tensor, Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool = False,
) -> tuple[Tensor, ...] | None:
    """What ``torch._VF.gru`` (or an LSTM's or RNN's) of these arguments gives; None where this is not for it.

    `counts` are a packed batch's sequences of each step.
    """
    firsts = (first,) if isinstance(first, Tensor) else first
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    directions, each = 1 + bidirectional, 4 if has_biases else 2
    suits = train and len(weights) == num_layers * directions * each  # else states are projected
    suits = suits and x.dim() == (3 if counts is None else 2) and _computes([*firsts, x, *weights], dtype)
    if not suits or (counts is not None and type(counts) is not Tensor):
        return None
    if counts is None:
        batch, length = x.shape[:2] if batch_first else x.shape[1::-1]
        steps = _Steps((batch,) * length)
    else:
        steps = _Steps(tuple(counts.tolist() if counts.dtype == torch.int64 and counts.dim() == 1 else ()))
    fits = x.numel() and _fits(kind, x[..., 0].numel(), steps, firsts, weights, each)
    whole = kind == "lstm" and steps.counts[:1] == steps.counts[-1:]  # PyTorch's library has it in one piece
    if whole or len(steps.counts) < FEWEST_STEPS or not fits:
        return None
    inputs = (x.transpose(0, 1) if batch_first else x).to(dtype).contiguous().flatten(0, -2)
    cast = [weight.to(dtype) for weight in weights]
    lasts: list[list[Tensor]] = []
    for layer in range(num_layers):
        found = []
        for direction in range(directions):
            place = layer * directions + direction
            own = [*cast[each * place : each * (place + 1)], None, None][:4]
            begin = [*(one[place] for one in firsts), None][:2]
            out, *last = _Layer.apply((kind, direction == 1, steps), inputs, *begin, *own)  # type: ignore[no-untyped-call]
            found.append(out)
            lasts.append(last)
        inputs = torch.cat(found, -1) if bidirectional else found[0]
        if dropout and layer < num_layers - 1:
            inputs = torch.dropout(inputs, dropout, train)
    told()
    result = dtype if kind.startswith("rnn") else firsts[-1].dtype  # as PyTorch gives it under autocast
    out = inputs.to(result, copy=not bidirectional)  # a view until here, which nobody could change in place
    ends = [torch.stack(those).to(result) for those in list(zip(*lasts, strict=True))[: len(firsts)]]
    if counts is None:
        out = out.view(len(steps.counts), -1, out.shape[-1])
    return (out.transpose(0, 1) if batch_first else out), *ends


def _computes(tensors: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """Can the layer be computed in that type here: of such tensors, for gradients, on a processor?"""
    suits = torch.is_grad_enabled() and dtype in COMPUTED and not is_transformed()
    kinds = {one.dtype for one in tensors}
    suits = suits and (kinds <= set(COMPUTED) if torch.is_autocast_enabled("cpu") else len(kinds) == 1)
    if not suits or any(one.device.type != "cpu" for one in tensors):
        return False
    # A mode may give tensors without memory where none went in.
    return all(type(one) in (Tensor, nn.Parameter) for one in (*tensors, torch.empty(0)))


def _fits(
    kind: str, rows: int, steps: _Steps, firsts: Sequence[Tensor], weights: Sequence[Tensor], each: int
) -> bool:
    """Has everything the size that the C code takes it to have? Of others PyTorch says what is wrong."""
    width = firsts[0].shape[-1]
    gates, begin = GATES.get(kind, 1) * width, (len(weights) // each, *steps.counts[:1], width)
    falls = all(more >= fewer for more, fewer in itertools.pairwise((*steps.counts, 1)))
    suits = falls and sum(steps.counts) == rows and all(one.shape == begin for one in firsts)
    suits = suits and all(one.shape == (gates, width) for one in weights[1::each])
    return suits and all(len(one) == gates for one in weights[::each])


def in_place_of(kind: str, told: Callable[[], object]) -> Callable[..., Any]:
    """What stands in the place of PyTorch's function for a kind of layers, while a module of it runs."""
    own = OVER_STEPS[kind]

    def function(*arguments: Argument) -> Any:
        # With the numbers of sequences of each step behind the data it is a packed batch.
        packed = len(arguments) > 3 and not isinstance(arguments[3], bool)
        x, *rest = arguments
        counts = rest.pop(0) if packed else None
        found = over_steps(kind, told, *cast("Any", (x, counts, *rest)))
        return own(*arguments) if found is None else found

    return function
