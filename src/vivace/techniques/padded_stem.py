"""The first convolution on images with zero channels added, so that its rows are aligned for matrix units."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Literal

from vivace.errors import Refused
from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.technique import UNIT_ROUNDOFF, Build, Card, Numerics, Stage, Technique

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclasses.dataclass(frozen=True)
class PaddedStem(Technique):
    """Convolutions over fewer channels than `channels`, such as the three of an image, see zeros beside them.

    Input and weight are padded in each forward pass in training; the parameter stays as it was, and gets its
    own gradient. Eight channels of 16 bits are 16 bytes. What it brings by itself has
    not been measured on a GPU yet.
    """

    card: ClassVar[Card] = Card(
        stage=Stage.MODEL,
        numerics=Numerics.ROUNDING,
        summary="the first convolution's channels padded to a multiple",
        source="https://docs.nvidia.com/deeplearning/performance/dl-performance-convolutional/index.html",
        unit_roundoff=UNIT_ROUNDOFF["float32"],
        measured_on=("cpu", "cuda"),
    )

    channels: Literal[4, 8] = 8

    def apply(self, build: Build) -> None:
        """Pad in front of every such convolution."""
        from vivace.mechanisms.forwards import own_convolutions
        from vivace.mechanisms.graphs import put_in_place

        narrow = [
            m for m in own_convolutions(build.models) if m.groups == 1 and m.in_channels < self.channels
        ]
        build.require(narrow, f"no 2-D convolution has fewer than {self.channels} input channels")
        build.notes["padded_convolutions"] = counts = [len(narrow), 0]
        build.on_close(put_in_place(narrow, _padded, self.channels, counts))

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """The number of convolutions, and what pads them."""
        count, calls = seen.notes["padded_convolutions"]
        if not calls and not seen.compiled_graphs:
            raise Refused("it changed nothing: no such convolution ran in training")
        return f"{count} convolution{'s'[: count != 1]} padded to {self.channels} channels"

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> list[Technique]:
        """On a GPU, where the convolutions' units want whole groups of channels."""
        wanted = machine.device.kind == "cuda" and profile.features.get("convolution_2d")
        return [cls(), cls(channels=4)] if wanted else []

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """The first of many convolutions: a few percent of them, and the copy of the images."""
        share = profile.operator_shares.get("convolution", 0.0)
        return (0.95, 1 / (1 - 0.1 * share)) if machine.device.kind == "cuda" else (0.9, 1.0)


def _padded(
    module: nn.Conv2d,
    own: Callable[[torch.Tensor], torch.Tensor],
    channels: int,
    counts: list[int],
    input: torch.Tensor,
) -> torch.Tensor:
    import torch
    from torch.nn.functional import pad

    from vivace.torch_internals.modules import convolution_with

    if not module.training or input.dim() != 4:
        plain: torch.Tensor = own(input)
        return plain
    if not torch.compiler.is_compiling():
        counts[1] += 1
    kind = input.device.type
    if torch.is_autocast_enabled(kind):  # the convolution would do it: half the bytes to pad
        input = input.to(torch.get_autocast_dtype(kind))
    more = (0, 0, 0, 0, 0, channels - module.in_channels)
    return convolution_with(module, pad(input, more), pad(module.weight, more), module.bias)
