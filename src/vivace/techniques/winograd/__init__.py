"""3x3 convolutions by minimal filtering: a quarter of the multiplications, and kernels of Vivace's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from vivace.errors import Refused
from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.technique import UNIT_ROUNDOFF, Build, Card, Numerics, Stage, Technique

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclasses.dataclass(frozen=True)
class Winograd(Technique):
    """3x3 convolutions and their gradients on a CPU by Winograd's minimal filtering, in float32.

    A tile of 4x4 results takes 36 products of each pair of channels in the place of 144. They are products of
    matrices, which PyTorch's library computes; the sums around them are C code, compiled once for the
    machine. Results deviate by some units of float32's last place more than a plain sum's. Inputs have to be
    in channels-last order, so it goes with channels_last; convolutions at a stride, with fewer than 32
    channels or on maps that tiles fill badly stay the library's, and so do those that autocast casts. A model
    that calls a convolution as a function is not reached.
    """

    card: ClassVar[Card] = Card(
        stage=Stage.MODEL,
        slot="precision",
        numerics=Numerics.ROUNDING,
        summary="3x3 convolutions in a quarter of the multiplications",
        source="https://arxiv.org/abs/1509.09308",
        unit_roundoff=UNIT_ROUNDOFF["float32"],
        devices=("cpu",),
        measured_on=("cpu",),
    )

    def apply(self, build: Build) -> None:
        """Compile the kernels where this machine has none yet, and put them behind each such convolution."""
        from torch import nn

        from vivace.mechanisms.forwards import act_in_steps
        from vivace.operators import NARROWEST
        from vivace.techniques.winograd.operators import library
        from vivace.tensors.modules import is_wide_window, modules_of

        found = [
            m
            for model in build.models
            for m in modules_of(model, nn.Conv2d)
            if type(m) is nn.Conv2d and is_wide_window(m)
        ]
        wanted = f"a 3x3 window at a stride of one, in one group, of {NARROWEST} channels or more"
        build.require(found, f"no 2-D convolution has {wanted}")
        try:
            library()
        except OSError as error:
            raise Refused(f"its kernels could not be compiled: {error}") from error
        build.notes["winograd_convolutions"] = len(found)
        act_in_steps(build, found, _convolution)

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """How many convolutions and gradients the kernels gave in a step."""
        names = ("vivace::winograd", "vivace::winograd_weights")
        maps, weights = (seen.operators.get(name, 0) for name in names)
        if maps + weights:
            return f"{maps} feature maps or their gradients, and gradients of {weights} weights"
        if not seen.compiled_graphs:
            raise Refused(
                "it changed nothing: no 3x3 convolution of enough pixels ran in float32 on channels-last maps"
            )
        return f"up to {seen.notes['winograd_convolutions']} convolutions"

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> list[Technique]:
        """Where such convolutions run on a CPU."""
        return [cls()] if profile.features.get("winograd_convolutions", 0.0) else []

    def company(self, profile: Profile, machine: Machine) -> list[dict[str, dict[str, Any]]]:
        """In another order all feature maps would be copied."""
        return [{"channels_last": {}}]

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """Such convolutions take from a third to all of the time."""
        share = profile.operator_shares.get("convolution", 0.0) * profile.features.get(
            "winograd_convolutions", 0.0
        )
        return (1 / (1 + 0.1 * share), 1 / (1 - 0.67 * share))


def _convolution(
    module: nn.Conv2d, own: Callable[[torch.Tensor], torch.Tensor], input: torch.Tensor
) -> torch.Tensor:
    from vivace.techniques.winograd.operators import convolution

    found = convolution(module, input) if module.training and input.dim() == 4 else None
    return own(input) if found is None else found
