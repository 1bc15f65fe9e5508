"""Let the GPU's matrix units read fp32 inputs rounded to TF32 (10 bits of mantissa); sums stay fp32."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from vivace.errors import Refused
from vivace.ledger import NO_KERNELS, Observation, Profile
from vivace.machine import Machine
from vivace.operators import MATRIX_CLASSES
from vivace.technique import Build, Card, Numerics, Plain, Stage, Technique

FP32_ERROR = 1e-5  # of a product's size: fp32 is off by about 1e-7, TF32 by about 3e-4


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
        step_memory="same",
        measured_on=("cuda",),
        baseline="tf32",
    )

    def apply(self, build: Build) -> None:
        """Set the three precision flags; refuse a GPU that has no TF32."""
        import torch

        from vivace.tensors.precision import set_fp32_precision, without_tf32

        reason = without_tf32(build.device)
        build.require(not reason, reason)
        backends: Any = torch.backends
        flags = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
        build.require(any(flag.fp32_precision != "tf32" for flag in flags), "TF32 is already allowed")
        set_fp32_precision(build, flags, "tf32")

    def plain(self) -> Plain:
        """The older switches, which set the newer, too: after the newer alone, reading the older fails."""
        places = ("cuda.matmul", "cudnn")
        return Plain(
            start=tuple(f"torch.backends.{place}.allow_tf32 = True" for place in places),
            transformers={"tf32": True},
        )

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """Kernels that ran here and not in the reference; a product's rounding where no kernels are shown."""
        if not reference.kernels:
            return _rounding(seen)
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


def _rounding(seen: Observation) -> str:
    """The proof by one product on the GPU, and by operators that read float32. Raises Refused."""
    if not seen.dtypes.get("float32"):
        raise Refused("it changed nothing: no matrix operator read float32")
    error = product_error("cuda")
    if error < FP32_ERROR:
        raise Refused(
            f"it changed nothing: a product in fp32 is off by {error:.0e} of its size, as without TF32"
        )
    return f"{NO_KERNELS}; a product in fp32 is off by {error:.0e} of its size, as TF32's are"


def product_error(device: str) -> float:
    """How far one fp32 matrix product on a device is from float64's, as a fraction of its size."""
    import torch

    numbers = torch.Generator().manual_seed(0)
    left, right = (torch.randn(256, 256, generator=numbers) for _ in range(2))
    exact = left.double() @ right.double()
    return float(((left.to(device) @ right.to(device)).cpu() - exact).norm() / exact.norm())
