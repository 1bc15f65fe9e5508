"""The stack: one matrix of all rows' weights, and one step that trains all of them.

The model is computed by `torch.func.functional_call` under `vmap`, which makes one batched product of the
rows' products, and of their convolutions one grouped convolution. Rows' own modules hold views of the matrix,
so that the person's metric and optimizer see each run as if it were alone.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, vmap

from vivace.errors import Refused
from vivace.sweeping.stacking.dropping import Rates, with_row_dropouts
from vivace.sweeping.stacking.feeding import Feed, rebuilt
from vivace.sweeping.stacking.rows import Row
from vivace.sweeping.stacking.tables import Leaves
from vivace.sweeping.stacking.updates import Own, Rule, rule_of
from vivace.tensors.optimizers import forget_gradients

_MODEL = "model."


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a weight stands in the matrix."""

    begin: int
    end: int
    shape: tuple[int, ...]
    group: int


@dataclasses.dataclass(frozen=True)
class Saved:
    """A stack as it was; see `Stack.saved`."""

    weights: torch.Tensor
    buffers: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]
    steps: list[int]
    optimizers: list[Any]
    generators: list[torch.Tensor]
    streams: list[dict[str, Any]]


class _Loss(nn.Module):
    """The person's loss of the model on a batch that is given by its leaves."""

    def __init__(self, model: nn.Module, loss: Any, feed: Feed) -> None:
        super().__init__()
        self.model, self.loss, self.feed = model, loss, feed

    def forward(self, leaves: Leaves) -> torch.Tensor:
        found: torch.Tensor = self.loss(self.model, rebuilt(self.feed.like, leaves))
        return found.reshape(())


class Stack:
    """Rows of one structure (see `structure_of`), at least one.

    `at_once` of them are computed at a time: as few as the processor's caches hold may be fastest.
    """

    def __init__(self, rows: Sequence[Row], feed: Feed) -> None:
        self.rows, self.feed = list(rows), feed
        self.at_once = len(self.rows)
        first = self.rows[0]
        self._layout, self._groups = _layout_of(first)
        self._rates = Rates()
        template = with_row_dropouts(first.model, self._rates)
        self._loss = _Loss(template, first.job.loss, feed)
        self._forward = vmap(self._one, randomness="error")
        self.weights = torch.stack([_flat(row, self._layout) for row in self.rows])
        self._gradient = self.weights[:0]
        self.buffers = _stacked_buffers(self.rows, self._layout)
        self.rule: Rule = rule_of(self.rows)(self.rows, self._groups)
        for slot in range(len(self.rows)):
            self._take_states(slot)
        self._point()

    def step(self, leaves: Leaves) -> torch.Tensor:
        """Train every row on its part of a stacked batch; returns the losses, (rows,), on the device."""
        count = len(self.rows)
        parts = [slice(begin, begin + self.at_once) for begin in range(0, count, self.at_once)]
        losses = torch.cat([self._computed(part, leaves) for part in parts])
        with torch.no_grad():
            self._on_gradients(self._gradient)
            self.rule.update(self.rows, self.weights, self._gradient)
        self._forget_gradients()
        return losses

    def _computed(self, part: slice, leaves: Leaves) -> torch.Tensor:
        """Losses of a part of the rows, (rows,); their gradients stand in its part of the matrix for them."""
        views = {name: view[part] for name, view in self._views.items()}
        buffers = {name: buffer[part] for name, buffer in self.buffers.items()}
        self._rates.part = part
        losses = self._forward(views, buffers, tuple(leaf[part] for leaf in leaves))
        found = torch.autograd.grad(losses.sum(), list(views.values()), allow_unused=True)
        for (name, into), gradient in zip(self._gradient_views.items(), found, strict=True):
            if gradient is None:
                raise Refused(f"'{name.removeprefix(_MODEL)}' takes no part in the loss")
            into[part].copy_(gradient)  # of a layer often transposed: copied once
        return losses.detach()

    def takes(self, row: Row) -> bool:
        """Would the row's own optimizer, beside those that are here, be updated as they are?"""
        return isinstance(self.rule, Own) or rule_of([*self.rows, row]) is type(self.rule)

    def replace(self, others: Mapping[int, Row]) -> None:
        """Other rows take the places, by slot, of those that leave."""
        for slot, row in others.items():
            self._detach(self.rows[slot])
            self.weights[slot] = _flat(row, self._layout)
            own = {f"{_MODEL}{name}": tensor for name, tensor in _held(row, self._layout)}
            for name, tensor in self.buffers.items():
                tensor[slot] = own[name]
            self.rows[slot] = row
            self.rule.forget(slot)
            self._take_states(slot)
        self._point()

    def add(self, rows: Sequence[Row]) -> None:
        """Further rows, behind those that are there."""
        begin = len(self.rows)
        self.rows += rows
        self.weights = torch.cat([self.weights, *(_flat(row, self._layout)[None] for row in rows)])
        further = _stacked_buffers(rows, self._layout)
        self.buffers = {name: torch.cat([tensor, further[name]]) for name, tensor in self.buffers.items()}
        self.rule.extend(len(rows))
        for slot in range(begin, len(self.rows)):
            self._take_states(slot)
        self._point()

    def remove(self, slots: Sequence[int]) -> None:
        """Rows leave, and nobody takes their places."""
        for slot in slots:
            self._detach(self.rows[slot])
        left = [slot for slot in range(len(self.rows)) if slot not in slots]
        self.rows = [self.rows[slot] for slot in left]
        if not left:
            return
        self.weights = self.weights[left].clone()
        self.buffers = {name: tensor[left].clone() for name, tensor in self.buffers.items()}
        self.rule.select(left)
        self._point()

    def saved(self) -> Saved:
        """Copies of all that a step changes."""
        own = [row.optimizer.state_dict() if isinstance(self.rule, Own) else None for row in self.rows]
        return Saved(
            self.weights.clone(),
            {name: tensor.clone() for name, tensor in self.buffers.items()},
            {name: tensor.clone() for name, tensor in self.rule.state.items()},
            list(self.rule.steps),
            [copy.deepcopy(state) for state in own],
            [row.generator.get_state() for row in self.rows],
            [dict(row.streams) for row in self.rows],
        )

    def put_back(self, saved: Saved) -> None:
        """Be as it was then; what rows' own optimizers noted in steps alone is forgotten."""
        with torch.no_grad():
            self.weights.copy_(saved.weights)
            for name, tensor in saved.buffers.items():
                self.buffers[name].copy_(tensor)
            for name, tensor in saved.state.items():
                self.rule.state[name].copy_(tensor)
        self.rule.steps = list(saved.steps)
        for row, own, generator, streams in zip(
            self.rows, saved.optimizers, saved.generators, saved.streams, strict=True
        ):
            row.optimizer.state.clear()
            if own is not None:
                row.optimizer.load_state_dict(copy.deepcopy(own))
            row.generator.set_state(generator)
            row.streams = dict(streams)

    @contextlib.contextmanager
    def lent(self, slot: int) -> Iterator[None]:
        """Within it the row's own optimizer remembers what the rule does of the row's steps."""
        row, own = self.rows[slot], isinstance(self.rule, Own)
        parameters = dict(row.model.named_parameters())
        for name, place in self._layout.items() if row.steps and not own else ():
            state: dict[str, Any] = {
                key: matrix[slot, place.begin : place.end].view(place.shape).clone()
                for key, matrix in self.rule.state.items()
            }
            if self.rule.steps[slot]:
                fused = row.optimizer.param_groups[place.group].get("fused")
                device = row.device if fused else torch.device("cpu")
                state["step"] = torch.tensor(float(self.rule.steps[slot]), device=device)
            row.optimizer.state[parameters[name]] = state
        yield
        if not own:
            row.optimizer.state.clear()

    def _take_states(self, slot: int) -> None:
        """What the row's own optimizer remembers stands in the rule's matrices from here on."""
        row = self.rows[slot]
        if isinstance(self.rule, Own):
            return
        own = dict(row.model.named_parameters())
        for name, place in self._layout.items():
            state = row.optimizer.state.get(own[name], {})
            for key, matrix in self.rule.state.items():
                if state.get(key) is not None:
                    matrix[slot, place.begin : place.end] = state[key].reshape(-1)
            self.rule.steps[slot] = int(state.get("step", 0))
        row.optimizer.state.clear()

    def _one(self, weights: Any, buffers: Any, leaves: Leaves) -> torch.Tensor:
        found: torch.Tensor = functional_call(self._loss, {**weights, **buffers}, (leaves,))
        return found

    def _point(self) -> None:
        """Let views of the matrix and of the buffers stand where rows' own weights and buffers are."""
        if len(self._gradient) != len(self.weights):
            self._gradient = torch.empty_like(self.weights)
            self._gradient_views = self._parts_of(self._gradient)
        parts = self._parts_of(self.weights)
        self._views = {name: part.detach().requires_grad_() for name, part in parts.items()}
        for slot, row in enumerate(self.rows):
            own = dict(row.model.named_parameters())
            for name, place in self._layout.items():
                own[name].data = self.weights[slot, place.begin : place.end].view(place.shape)
            for name, tensor in _held(row, self._layout):
                tensor.data = self.buffers[f"{_MODEL}{name}"][slot]
        self._rates.read(self.rows)

    def _parts_of(self, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        """By weight its columns of the matrix, (rows, ...)."""
        return {
            f"{_MODEL}{name}": matrix[:, place.begin : place.end].view(len(matrix), *place.shape)
            for name, place in self._layout.items()
        }

    def _detach(self, row: Row) -> None:
        """A row that leaves keeps what it has reached."""
        for tensor in itertools.chain(row.model.parameters(), row.model.buffers()):
            tensor.data = tensor.data.clone()

    def _on_gradients(self, gradient: torch.Tensor) -> None:
        """Show each row's own gradients to the person's function, or to the row's own optimizer."""
        seen = self.rows[0].job.on_gradients is not None
        if not (seen or isinstance(self.rule, Own)):
            return
        for slot, row in enumerate(self.rows):
            own = dict(row.model.named_parameters())
            for name, place in self._layout.items():
                own[name].grad = gradient[slot, place.begin : place.end].view(place.shape)
            if row.job.on_gradients is not None:
                with torch.enable_grad():
                    row.job.on_gradients(row.model)
                for name, place in self._layout.items():
                    found = own[name].grad
                    into = gradient[slot, place.begin : place.end].view(place.shape)
                    if found is None:
                        raise Refused(f"on_gradients takes the gradient of '{name}' away")
                    if found.data_ptr() != into.data_ptr():
                        into.copy_(found)

    def _forget_gradients(self) -> None:
        if self.rows[0].job.on_gradients is not None or isinstance(self.rule, Own):
            for row in self.rows:
                forget_gradients(row.optimizer)


def _layout_of(row: Row) -> tuple[dict[str, _Place], torch.Tensor]:
    """The places of the weights that the optimizer trains, and the group of each column of the matrix."""
    group_of = {
        id(parameter): index
        for index, group in enumerate(row.optimizer.param_groups)
        for parameter in group["params"]
    }
    layout, columns, begin = dict[str, _Place](), list[torch.Tensor](), 0
    for name, parameter in row.model.named_parameters():
        group = group_of.get(id(parameter))
        if group is None or not parameter.requires_grad:
            continue
        end = begin + parameter.numel()
        layout[name] = _Place(begin, end, tuple(parameter.shape), group)
        columns.append(torch.full((parameter.numel(),), group, dtype=torch.long))
        begin = end
    if not layout:
        raise Refused("the optimizer trains none of the model's weights")
    return layout, torch.cat(columns).to(row.device)


def _flat(row: Row, layout: dict[str, _Place]) -> torch.Tensor:
    own = dict(row.model.named_parameters())
    return torch.cat([own[name].detach().reshape(-1) for name in layout])


def _held(row: Row, layout: dict[str, _Place]) -> list[tuple[str, torch.Tensor]]:
    """What is not trained: buffers, and weights that the optimizer leaves alone."""
    frozen = [(name, p) for name, p in row.model.named_parameters() if name not in layout]
    return [*frozen, *row.model.named_buffers()]


def _stacked_buffers(rows: Sequence[Row], layout: dict[str, _Place]) -> dict[str, torch.Tensor]:
    held = [_held(row, layout) for row in rows]
    return {
        f"{_MODEL}{same[0][0]}": torch.stack([tensor.detach() for _, tensor in same])
        for same in zip(*held, strict=True)
    }
