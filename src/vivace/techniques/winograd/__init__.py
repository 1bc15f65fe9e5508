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
    machine. Errors are several times those of plain sums: 1e-6 to 3e-6 of the result's norm. Where one number
    of a tile is huge, its neighbours there lose digits; where one is infinite or NaN, they become NaN. Inputs
    or weights have to be in channels-last order, so it goes with channels_last; convolutions at a stride,
    with fewer than 32 channels or on maps that tiles fill badly stay the library's, and so do those that
    autocast casts. A model that calls a convolution as a function is not reached, nor are parts in evaluation
    mode.
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
        import torch

        from vivace.mechanisms.forwards import act_in_steps, own_convolutions
        from vivace.operators import NARROWEST_WINDOW
        from vivace.techniques.winograd.operators import library
        from vivace.tensors.modules import is_wide_window

        single = [m for m in own_convolutions(build.models) if m.weight.dtype == torch.float32]
        found = [m for m in single if is_wide_window(m)]
        wanted = f"a 3x3 window at a stride of one, in one group, of {NARROWEST_WINDOW} channels or more"
        build.require(found, f"no 2-D convolution in float32 has {wanted}")
        backends: Any = torch.backends
        rounding = backends.mkldnn.matmul.fp32_precision
        exact = rounding in ("none", "ieee")
        build.require(exact, f"the script lets matrix products in float32 round as {rounding}")
        try:
            library()
        except OSError as error:
            raise Refused(f"its kernels could not be compiled: {error}") from error
        act_in_steps(build, found, _convolution)

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """How many convolutions and gradients the kernels gave in a step."""
        names = ("vivace::winograd", "vivace::winograd_weights")
        maps, weights = (seen.operators.get(name, 0) for name in names)
        if maps + weights:
            return f"{maps} feature maps or their gradients, and gradients of {weights} weights"
        raise Refused(
            "it changed nothing: no 3x3 convolution of enough pixels ran in float32 on channels-last maps"
        )

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> list[Technique]:
        """Where such convolutions run on a CPU, unless it has matrix units, whose bfloat16 is far faster."""
        units = "amx_bf16" in machine.device.features
        return [cls()] if profile.features.get("winograd_convolutions", 0.0) and not units else []

    def company(self, profile: Profile, machine: Machine) -> list[dict[str, dict[str, Any]]]:
        """In another order nothing is to be gained; alone where the model has this one already."""
        return [{"channels_last": {}}, {}]

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
