"""Convolutions with 1x1 windows as what they are in NHWC order: matrix products."""

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
class Conv1x1Gemm(Technique):
    """Ungrouped 1x1 convolutions of stride one call the matrix library instead of the convolution library.

    A feature map in channels-last order is a matrix of pixels by channels, and nothing is copied; in another
    order it would be, so it goes with channels_last. With compile, the compiler fuses what follows with the
    products. Speed has not been measured on a GPU yet.
    """

    card: ClassVar[Card] = Card(
        stage=Stage.MODEL,
        numerics=Numerics.ROUNDING,
        summary="1x1 convolutions as matrix products",
        source="https://docs.nvidia.com/deeplearning/performance/dl-performance-convolutional/index.html",
        unit_roundoff=UNIT_ROUNDOFF["float32"],
        measured_on=("cpu",),
    )

    def apply(self, build: Build) -> None:
        """Put a matrix product in the place of every such convolution's forward."""
        from torch import nn

        from vivace.mechanisms.graphs import is_product, put_in_place
        from vivace.tensors.modules import modules_of

        found = [m for model in build.models for m in modules_of(model, nn.Conv2d) if is_product(m)]
        build.require(found, "no 2-D convolution has a 1x1 window, stride one and one group")
        build.on_close(put_in_place(found, _product))
        build.notes["convolutions_as_products"] = len(found)

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """The products that took the place of convolutions, by the operators that ran."""
        before, after = (o.operators.get("aten::convolution", 0) for o in (reference, seen))
        if seen.compiled_graphs == 0 and after >= before:
            raise Refused("it changed nothing: as many convolutions ran as before")
        return f"{seen.notes['convolutions_as_products']} 1x1 convolutions ran as matrix products"

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> list[Technique]:
        """On a GPU, where the two libraries differ."""
        wanted = machine.device.kind == "cuda" and profile.features.get("convolution_2d")
        return [cls()] if wanted else []

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """The same operations and bytes, by another library's kernels."""
        share = profile.operator_shares.get("convolution", 0.0)
        return (1 / (1 + 0.5 * share), 1 / (1 - 0.2 * share))


def _product(module: nn.Conv2d, own: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    from torch.nn.functional import linear

    if not module.training or x.dim() != 4:
        plain: torch.Tensor = own(x)
        return plain
    return linear(x.movedim(1, -1), module.weight.flatten(1), module.bias).movedim(-1, 1)
