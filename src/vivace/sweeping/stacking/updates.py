"""Updates of all rows at once: one matrix of weights, a row a run, and a column of settings for each setting.

A rule computes what torch's own optimizer computes for each row alone. What has no rule is updated by each
row's own optimizer, on views of the matrix.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from vivace.session.opening import schedulers_of
from vivace.sweeping.stacking.rows import Row
from vivace.torch_internals.modules import inner_schedules


class Rule(abc.ABC):
    """Updates the matrix `weights` of shape (rows, numbers of one model) from a gradient of that shape.

    Args:
        rows: in the order of the matrix; their own optimizers hold the settings, and their schedules move
            them.
        groups: the index of its parameter group for each column.
    """

    states: ClassVar[tuple[str, ...]] = ()

    def __init__(self, rows: Sequence[Row], groups: torch.Tensor) -> None:
        self.groups = groups
        self.steps = [0] * len(rows)
        self.state = {name: torch.zeros(len(rows), len(groups), device=groups.device) for name in self.states}
        self._settings: dict[str, tuple[Any, torch.Tensor]] = {}

    @abc.abstractmethod
    def update(self, rows: Sequence[Row], weights: torch.Tensor, gradient: torch.Tensor) -> None:
        """One step of every row; `gradient` may be overwritten."""

    def column(self, rows: Sequence[Row], name: str) -> torch.Tensor:
        """A setting of every row: (rows, 1), or (rows, columns) where the groups of a row differ in it."""
        values = [[float(group[name]) for group in row.optimizer.param_groups] for row in rows]
        return self.spread(name, values)

    def spread(self, name: str, values: list[list[float]]) -> torch.Tensor:
        """Values by row and group as a tensor that broadcasts over the matrix; kept while they stay."""
        known = self._settings.get(name)
        if known is None or known[0] != values:
            table = torch.tensor(values, dtype=torch.float32, device=self.groups.device)
            alone = all(len(set(row)) == 1 for row in values)
            known = self._settings[name] = values, table[:, :1] if alone else table[:, self.groups]
        return known[1]

    def any(self, name: str) -> bool:
        """Is a setting that `column` or `spread` was asked for other than 0 anywhere?"""
        return any(map(any, self._settings[name][0]))

    def forget(self, slot: int) -> None:
        """A new row stands in this slot."""
        self.steps[slot] = 0
        for state in self.state.values():
            state[slot] = 0.0

    def extend(self, count: int) -> None:
        """So many new rows stand behind the others."""
        self.steps += [0] * count
        self.state = {
            name: torch.cat([state, state.new_zeros(count, len(self.groups))])
            for name, state in self.state.items()
        }
        self._settings = {}

    def select(self, slots: Sequence[int]) -> None:
        """Keep these rows alone, in this order."""
        self.steps = [self.steps[slot] for slot in slots]
        self.state = {name: state[list(slots)] for name, state in self.state.items()}
        self._settings = {}


class SGD(Rule):
    """torch.optim.SGD with weight decay, momentum and Nesterov's momentum."""

    states = ("momentum_buffer",)

    def update(self, rows: Sequence[Row], weights: torch.Tensor, gradient: torch.Tensor) -> None:
        """One step of every row."""
        decay = self.column(rows, "weight_decay")
        if self.any("weight_decay"):
            gradient.addcmul_(weights, decay.expand_as(weights))
        momentum = self.column(rows, "momentum")
        buffer = self.state["momentum_buffer"]
        buffer.mul_(momentum).add_(gradient)
        if rows[0].optimizer.param_groups[0]["nesterov"]:
            buffer = torch.addcmul(gradient, buffer, momentum.expand_as(buffer))
        weights.addcmul_(buffer, self.column(rows, "lr").expand_as(buffer), value=-1.0)


class Adam(Rule):
    """torch.optim.Adam, with weight decay in the gradient."""

    states = ("exp_avg", "exp_avg_sq")
    decoupled = False

    def update(self, rows: Sequence[Row], weights: torch.Tensor, gradient: torch.Tensor) -> None:
        """One step of every row."""
        self.steps = [step + 1 for step in self.steps]
        groups = [row.optimizer.param_groups for row in rows]
        decay = self.column(rows, "weight_decay")
        if self.any("weight_decay") and self.decoupled:
            weights.mul_(
                self.spread("kept", [[1 - g["lr"] * g["weight_decay"] for g in own] for own in groups])
            )
        elif self.any("weight_decay"):
            gradient.addcmul_(weights, decay.expand_as(weights))
        betas = [[group["betas"] for group in some] for some in groups]
        mean, square = self.state["exp_avg"], self.state["exp_avg_sq"]
        mean.lerp_(
            gradient, self.spread("1 - beta1", [[1 - b for b, _ in some] for some in betas]).expand_as(mean)
        )
        square.mul_(self.spread("beta2", [[b for _, b in some] for some in betas]))
        square.addcmul_(
            gradient * self.spread("1 - beta2", [[1 - b for _, b in some] for some in betas]), gradient
        )
        counted = list(zip(betas, self.steps, strict=True))
        root = [[(1 - b**step) ** 0.5 for _, b in some] for some, step in counted]
        sizes = [
            [group["lr"] / (1 - b**step) for (b, _), group in zip(some, own, strict=True)]
            for (some, step), own in zip(counted, groups, strict=True)
        ]
        below = square.sqrt().div_(self.spread("root", root)).add_(self.column(rows, "eps"))
        weights.addcdiv_(mean * self.spread("size", sizes), below, value=-1.0)


class AdamW(Adam):
    """torch.optim.AdamW, with weight decay beside the gradient."""

    decoupled = True


class Own(Rule):
    """Each row's own optimizer, one after another, on its part of the matrix."""

    def update(self, rows: Sequence[Row], weights: torch.Tensor, gradient: torch.Tensor) -> None:
        """One step of every row."""
        for row in rows:
            row.optimizer.step()


_RULES: dict[type[torch.optim.Optimizer], type[Rule]] = {
    torch.optim.SGD: SGD,
    torch.optim.Adam: Adam,
    torch.optim.AdamW: AdamW,
}
_DECOUPLED = "decoupled_weight_decay"  # which an Adam may be told, and is AdamW then
_OFF = ("amsgrad", "maximize", "capturable", "differentiable", "dampening")


def _does_more(schedule: Any) -> bool:
    """Does a schedule do more than to compute the learning rate, by a `step` of a person's own?"""
    own = not type(schedule).step.__module__.startswith("torch.")
    return own or any(map(_does_more, inner_schedules(schedule)))


def rule_of(rows: Sequence[Row]) -> type[Rule]:
    """The rule that does what the rows' own optimizers do; `Own` where there is none for it."""
    groups = [group for row in rows for group in row.optimizer.param_groups]
    if any(_does_more(schedule) for row in rows for schedule in schedulers_of(row.scheduler)):
        return Own  # a person's own schedule may change what the optimizer remembers, such as its momentum
    if any(group.get(name) for group in groups for name in _OFF):
        return Own
    if any(isinstance(group["lr"], torch.Tensor) for group in groups):
        return Own
    if any(len({bool(group.get(name)) for group in groups}) > 1 for name in ("nesterov", _DECOUPLED)):
        return Own
    rule = _RULES.get(type(rows[0].optimizer), Own)
    return AdamW if rule is Adam and groups[0].get(_DECOUPLED) else rule


def baseline_of(row: Row) -> str:
    """How a row's own optimizer computes: ``SGD, a loop over tensors``."""
    group, name = row.optimizer.param_groups[0], type(row.optimizer).__name__
    if group.get("fused"):
        return f"{name} with fused=True"
    if group.get("foreach") or (group.get("foreach") is None and row.device.type == "cuda"):
        return f"{name} with foreach"
    return f"{name} with a loop over tensors, torch's default on a CPU"
