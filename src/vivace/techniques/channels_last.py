"""Keep feature maps channels-last, the layout in which convolution kernels read whole pixels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.technique import Build, Card, Numerics, Seam, Stage, Technique

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True)
class ChannelsLast(Technique):
    """Weights of 2-D convolutions and 4-D batch tensors in NHWC memory order; shapes stay NCHW."""

    card: ClassVar[Card] = Card(
        stage=Stage.MODEL,
        numerics=Numerics.ROUNDING,
        summary="feature maps in NHWC memory order",
        source="https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html",
        unit_roundoff=2.0**-24,
        measured_on=("cpu",),
        lowers_peak=True,
    )

    def apply(self, build: Build) -> None:
        """Reorder the weights in place and every 4-D floating-point tensor of a batch when it is placed."""
        import torch

        from vivace.tensors.modules import modules_of
        from vivace.tensors.optimizers import align_state
        from vivace.tensors.trees import map_tensors

        convolutions = [
            m for model in build.models for m in modules_of(model, torch.nn.Conv2d, torch.nn.ConvTranspose2d)
        ]
        build.require(convolutions, "the model has no 2-D convolution")
        build.on_close(lambda: align_state(build.optimizers))
        for module in convolutions:
            weight: torch.Tensor = module.weight  # type: ignore[assignment]
            weight.data = weight.data.contiguous(memory_format=torch.channels_last)
            build.on_close(lambda w=weight: setattr(w, "data", w.data.contiguous()))  # type: ignore[misc]
        align_state(build.optimizers)

        def reorder(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() == 4 and tensor.is_floating_point():
                return tensor.contiguous(memory_format=torch.channels_last)
            return tensor

        def place(following: Callable[[Any], Any], batch: Any) -> Any:
            return map_tensors(following(batch), reorder)

        build.wrap(Seam.PLACE, place)
        build.notes["convolutions"] = len(convolutions)

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """The number of convolutions whose weights were reordered."""
        return f"{seen.notes['convolutions']} convolutions in channels-last order"

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """Convolutions may become half as fast (grouped ones) or nearly twice as fast."""
        share = profile.operator_shares.get("convolution", 0.0) + profile.operator_shares.get("norm", 0.0)
        return (1 / (1 + 0.5 * share), 1 / (1 - 0.45 * share)) if share else (1.0, 1.0)
