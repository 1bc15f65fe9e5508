"""Dropout of all rows at once, each at its own rate and from its own random stream."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from vivace.sweeping.stacking.rows import Row


class Rates:
    """Where the rows' dropouts find their rates and streams: what stands in each slot now."""

    def __init__(self) -> None:
        self.by_name: dict[str, list[float]] = {}
        self.generators: list[torch.Generator] = []
        self.part = slice(None)  # of the rows, that is computed now

    def read(self, rows: Sequence[Row]) -> None:
        """From the rows' own modules, in the order of the stack."""
        self.generators = [row.generator for row in rows]
        self.by_name = {}
        for row in rows:
            for name, module in row.model.named_modules():
                if type(module) is nn.Dropout:
                    self.by_name.setdefault(name, []).append(float(module.p))


class RowDropout(nn.Module):
    """Stands in place of an `nn.Dropout` of one model, in the model that computes all rows.

    Each row draws the mask that `nn.Dropout` would draw for it alone, from its own generator.
    """

    def __init__(self, name: str, rates: Rates) -> None:
        super().__init__()
        self.name, self.rates = name, rates

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape, scaled so that its expectation stays."""
        if not self.training or not any(self.rates.by_name[self.name][self.rates.part]):
            return x
        found: torch.Tensor = _Dropped.apply(x, self)
        return found

    def noise(self, like: torch.Tensor) -> torch.Tensor:
        """What `like` of shape (rows, ...) is multiplied by."""
        found = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        rates, generators = self.rates.by_name[self.name], self.rates.generators
        part = self.rates.part
        for place, rate, generator in zip(found, rates[part], generators[part], strict=True):
            if not rate:
                place.fill_(1.0)
            elif rate == 1.0:
                place.zero_()
            else:
                place.bernoulli_(1.0 - rate, generator=generator).div_(1.0 - rate)
        return found


class _Dropped(torch.autograd.Function):
    """Under `vmap` alone: multiplies all rows by their masks."""

    @staticmethod
    def forward(x: torch.Tensor, dropout: RowDropout) -> torch.Tensor:
        raise AssertionError("it is computed for all rows at once")

    @staticmethod
    def setup_context(ctx: object, inputs: object, output: object) -> None:
        """Nothing is kept: `vmap` below is made of operators that have gradients."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, dropout: RowDropout) -> tuple[torch.Tensor, int]:
        """The rows are in dimension ``in_dims[0]``."""
        x = x.movedim(in_dims[0], 0)
        return x * dropout.noise(x), 0


def with_row_dropouts(model: nn.Module, rates: Rates) -> nn.Module:
    """A copy of the model, in training mode, in which rows draw their own masks."""
    found = copy.deepcopy(model)
    found.train()
    for name, module in list(found.named_modules()):
        if type(module) is nn.Dropout:
            parent, _, own = name.rpartition(".")
            if not name:
                return RowDropout(name, rates)
            setattr(found.get_submodule(parent), own, RowDropout(name, rates))
    return found
