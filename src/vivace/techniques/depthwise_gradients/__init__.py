"""Gradients of depthwise convolutions by kernels of Vivace's own, where oneDNN has none that are fast."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from vivace.errors import Refused
from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.technique import UNIT_ROUNDOFF, Build, Card, Numerics, Stage, Technique

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclasses.dataclass(frozen=True)
class DepthwiseGradients(Technique):
    """Depthwise convolutions on a CPU get their gradients from C code, compiled once for the machine.

    oneDNN's kernels for these gradients are fast for 3x3 windows at stride one alone. The weights of larger
    or dilated windows take 5 to 30 times as long by them, and so does the input at a stride, in bfloat16. The
    forward pass stays oneDNN's. Inputs in channels-last order are taken as they lie, others are copied. Sums
    are in float32. A model that calls a convolution as a function is not reached.
    """

    card: ClassVar[Card] = Card(
        stage=Stage.MODEL,
        numerics=Numerics.ROUNDING,
        summary="faster gradients of depthwise convolutions",
        source="https://arxiv.org/abs/1704.04861",
        unit_roundoff=UNIT_ROUNDOFF["float32"],
        devices=("cpu",),
        measured_on=("cpu",),
    )

    def apply(self, build: Build) -> None:
        """Compile the kernels where this machine has none yet, and put them behind each such convolution."""
        from vivace.mechanisms.forwards import act_in_steps, own_convolutions
        from vivace.techniques.depthwise_gradients.operators import library, may_gain

        found = [m for m in own_convolutions(build.models) if may_gain(m)]
        wanted = "depthwise with a window of more than 3x3, a stride or a dilation"
        build.require(found, f"no 2-D convolution is {wanted}")
        try:
            library()
        except OSError as error:
            raise Refused(f"its kernels could not be compiled: {error}") from error
        build.notes["depthwise_convolutions"] = len(found)
        act_in_steps(build, found, _convolution)

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """How many gradients the kernels gave in a step."""
        names = ("vivace::depthwise_weights", "vivace::depthwise_input")
        weights, inputs = (seen.operators.get(name, 0) for name in names)
        if weights + inputs:
            return f"gradients of {weights} weights and {inputs} inputs of depthwise convolutions"
        if not seen.compiled_graphs:
            raise Refused(
                "it changed nothing: no gradient that it has was wanted in float32 or bfloat16; of undilated "
                "3x3 windows it has those at a stride in bfloat16 alone"
            )
        return f"gradients of up to {seen.notes['depthwise_convolutions']} convolutions"

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> list[Technique]:
        """Where such convolutions run on a CPU."""
        return [cls()] if profile.features.get("slow_depthwise") else []

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """Of the time of all convolutions such gradients take from a tenth to two thirds."""
        share = profile.operator_shares.get("convolution", 0.0)
        return (0.9, 1 / (1 - 0.66 * share)) if profile.features.get("slow_depthwise") else (1.0, 1.0)


def _convolution(
    module: nn.Conv2d, own: Callable[[torch.Tensor], torch.Tensor], input: torch.Tensor
) -> torch.Tensor:
    from vivace.techniques.depthwise_gradients.operators import convolution

    found = convolution(module, input) if module.training and input.dim() == 4 else None
    return own(input) if found is None else found
