"""Let the GPU's matrix units read fp32 inputs rounded to TF32 (10 bits of mantissa); sums stay fp32."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from vivace.errors import Refused
from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.technique import Build, Card, Numerics, Stage, Technique

MATRIX_CLASSES = ("matmul", "convolution", "recurrent", "attention")


@dataclasses.dataclass(frozen=True)
class Tf32(Technique):
    """TF32 for matrix products, convolutions and recurrent layers; weights and sums stay fp32."""

    card: ClassVar[Card] = Card(
        stage=Stage.PROCESS,
        numerics=Numerics.ROUNDING,
        summary="fp32 matrix inputs rounded to TF32 on the GPU's matrix units",
        source="https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices",
        unit_roundoff=2.0**-11,
        devices=("cuda",),
        measured_on=(),
    )

    def apply(self, build: Build) -> None:
        """Set the three precision flags; refuse a GPU older than Ampere."""
        import torch

        from vivace.surgery import set_fp32_precision

        build.require(
            torch.cuda.get_device_capability(build.device) >= (8, 0), "this GPU is older than Ampere: no TF32"
        )
        backends: Any = torch.backends
        flags = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
        build.require(any(flag.fp32_precision != "tf32" for flag in flags), "TF32 is already allowed")
        set_fp32_precision(build, flags, "tf32")

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """Kernels that ran here and not in the reference."""
        new = sorted(seen.kernels.keys() - reference.kernels.keys())
        if not new:
            raise Refused("it changed nothing: the GPU ran the kernels of the reference")
        tf32 = sum(count for name, count in seen.kernels.items() if "tf32" in name.lower())
        return f"{len(new)} kernels not in the reference, {tf32} launches named tf32"

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> list[Technique]:
        """Nothing for a model that is not in fp32."""
        return [cls()] if profile.features.get("dtype", "float32") == "float32" else []

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """Matrix operators may run up to eight times as fast; the rest of the step stays."""
        share = sum(profile.operator_shares.get(kind, 0.0) for kind in MATRIX_CLASSES)
        return (1.0, 1 / (1 - 0.875 * share))
