"""Quantization-aware training: the model of a run trained further while its products are rounded to int8.

What is rounded is what the int8 forms round (Jacob et al. 2018, https://arxiv.org/abs/1712.05877): weights
channel by channel, symmetrically; inputs as one tensor, between the least and the largest value of the batch.
Gradients pass through the rounding as if it were not there (Bengio et al. 2013,
https://arxiv.org/abs/1308.3432). Parameters keep their names and stay in the job's own number format.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from vivace.errors import Refused
from vivace.job import Job, load
from vivace.serving.trained import load_trained


def quantization_aware(job: Job | str, *, run: str | os.PathLike[str]) -> Job:
    """The job with a model that learns to compute in int8, beginning with the weights of a run.

    Convolutions and linear layers round their weights and inputs in training mode alone: in evaluation mode
    the model computes as the job's own does, so that any form can be made of it. What that one keeps frozen
    stays so.

    Args:
        job: a Job, or its reference.
        run: the folder of a `vivace.train` of it.

    Its `model` raises Refused where the model has neither.
    """
    whole = load(job) if isinstance(job, str) else job
    return dataclasses.replace(whole, model=lambda: _rounding(whole, Path(run)))


def _rounding(job: Job, run: Path) -> nn.Module:
    model, _ = load_trained(job, run)
    layers = [module for module in model.modules() if _can_round(module)]
    if not layers:
        raise Refused("the model has no convolution or linear layer that int8 could serve")
    for layer in layers:
        layer.__class__ = KINDS[type(layer)]  # a copy of the model rounds as well, by its own weights
    return model.train()


def _can_round(module: nn.Module) -> bool:
    """Is it one of torch's own layers, and not one that a person derived from them?"""
    return type(module) in KINDS and getattr(module, "padding_mode", "zeros") == "zeros"


def rounded_inputs(inputs: torch.Tensor) -> torch.Tensor:
    """A tensor of any shape in 256 steps between its least and its largest value, of which one is zero."""
    with torch.no_grad():
        exact = inputs.float()
        low, high = exact.amin().clamp(max=0.0), exact.amax().clamp(min=0.0)
        step = ((high - low) / 255).clamp(min=1e-12)
        zero = (-low / step).round()
        found = (((exact / step).round() + zero).clamp(0, 255) - zero) * step
    return inputs + (found.to(inputs.dtype) - inputs).detach()


def rounded_weights(weights: torch.Tensor) -> torch.Tensor:
    """Weights of shape (outputs, ...) in 255 steps for each output, from minus to plus its largest."""
    with torch.no_grad():
        exact = weights.float()
        largest = exact.abs().amax(dim=tuple(range(1, exact.dim())), keepdim=True)
        step = (largest / 127).clamp(min=1e-12)
        found = (exact / step).round() * step
    return weights + (found.to(weights.dtype) - weights).detach()


class RoundedLinear(nn.Linear):
    """A linear layer that computes with int8's steps while it trains."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., inputs) to (..., outputs)."""
        if not self.training:
            return super().forward(input)
        return functional.linear(rounded_inputs(input), rounded_weights(self.weight), self.bias)


class RoundedConv1d(nn.Conv1d):
    """A convolution over (samples, channels, length) that computes with int8's steps while it trains."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As its own class, on rounded inputs and weights."""
        return _convolved(self, functional.conv1d, input) if self.training else super().forward(input)


class RoundedConv2d(nn.Conv2d):
    """A convolution over (samples, channels, height, width) with int8's steps while it trains."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As its own class, on rounded inputs and weights."""
        return _convolved(self, functional.conv2d, input) if self.training else super().forward(input)


class RoundedConv3d(nn.Conv3d):
    """A convolution over (samples, channels, depth, height, width) with int8's steps while it trains."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As its own class, on rounded inputs and weights."""
        return _convolved(self, functional.conv3d, input) if self.training else super().forward(input)


Convolve = Callable[..., torch.Tensor]
Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
KINDS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: RoundedLinear,
    nn.Conv1d: RoundedConv1d,
    nn.Conv2d: RoundedConv2d,
    nn.Conv3d: RoundedConv3d,
}


def _convolved(layer: Convolution, convolve: Convolve, input: torch.Tensor) -> torch.Tensor:
    given = (layer.bias, layer.stride, layer.padding, layer.dilation, layer.groups)
    return convolve(rounded_inputs(input), rounded_weights(layer.weight), *given)
