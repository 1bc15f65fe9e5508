"""Gradients that a step of a person's own has added up, and that no update has used yet."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch


class Unapplied:
    """Of each optimizer that made no update in the newest step. The gradients that others leave behind are
    those of their update, which the next step clears.

    Args:
        optimizers: those of a Job with its own step.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._updated = set[int]()
        for number, optimizer in enumerate(self._optimizers):
            optimizer.register_step_post_hook(partial(_note, self._updated, number))

    def step_begins(self) -> None:
        """Called before each step."""
        self._updated.clear()

    def state(self) -> list[list[torch.Tensor | None]]:
        """The gradients of each optimizer's weights, in its order; empty where it has made its update."""
        return [
            [] if number in self._updated else [weight.grad for weight in _weights(optimizer)]
            for number, optimizer in enumerate(self._optimizers)
        ]

    def load(self, state: list[list[torch.Tensor | None]]) -> None:
        """Let the weights have them again; raises ValueError where there are others."""
        for optimizer, gradients in zip(self._optimizers, state, strict=bool(state)):
            for weight, gradient in zip(_weights(optimizer), gradients, strict=True) if gradients else ():
                weight.grad = None if gradient is None else gradient.to(weight.device)


def _note(updated: set[int], number: int, *_: object) -> None:
    updated.add(number)


def _weights(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]
