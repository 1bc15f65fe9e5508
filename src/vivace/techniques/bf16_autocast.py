"""Mixed precision: matrix products and convolutions in bfloat16, the rest in fp32."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.precision import bfloat16_gain, require_bfloat16, share_in
from vivace.technique import UNIT_ROUNDOFF, Build, Card, Numerics, Seam, Stage, Technique

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True)
class Bf16Autocast(Technique):
    """The forward pass under `torch.autocast` to bfloat16; parameters and gradients stay in fp32.

    Weights are cast once a forward pass (autocast's cache). In an own step function only the models run in
    bfloat16, with their outputs returned in fp32: losses and what is between the models keep full precision.
    """

    card: ClassVar[Card] = Card(
        stage=Stage.PRECISION,
        numerics=Numerics.ROUNDING,
        summary="matrix products and convolutions in bfloat16 by autocast",
        source="https://docs.pytorch.org/docs/stable/amp.html",
        slot="precision",
        unit_roundoff=UNIT_ROUNDOFF["bfloat16"],
        measured_on=("cpu",),
    )

    def apply(self, build: Build) -> None:
        """Run the forward seam, or each model of an own step, under autocast."""
        import torch

        from vivace.surgery import sum_in_float32

        require_bfloat16(build)
        sum_in_float32(build)
        context = torch.autocast(build.device.type, torch.bfloat16)
        if build.own_step:
            _wrap_models(build, context)
            return

        def forward(following: Callable[[Any], torch.Tensor], batch: Any) -> torch.Tensor:
            with context:
                return following(batch).float()

        build.wrap(Seam.FORWARD, forward)

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """The share of matrix and convolution inputs that were bfloat16."""
        return share_in("bfloat16", seen)

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """Casts cost a part of what is not a product."""
        return bfloat16_gain(profile, machine, casts=0.3)


def _wrap_models(build: Build, context: torch.autocast) -> None:
    import torch

    from vivace.surgery import cast, patched

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*arguments: Any, **keywords: Any) -> Any:
            with context:
                outputs = original(*arguments, **keywords)
            return cast(outputs, torch.bfloat16, torch.float32)

        return forward

    forwards = [wrapped(model.forward) for model in build.models]

    def step(following: Callable[[Any], Any], batch: Any) -> Any:
        with patched(build.models, "forward", forwards):
            return following(batch)

    build.wrap(Seam.STEP, step)
