"""Let cuDNN time its convolution algorithms on the first step of each shape, and keep the fastest."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from vivace.errors import Refused
from vivace.ledger import NO_KERNELS, Observation, Profile
from vivace.machine import Machine
from vivace.technique import Build, Card, Numerics, Plain, Stage, Technique


@dataclasses.dataclass(frozen=True)
class CudnnBenchmark(Technique):
    """Measured instead of guessed convolution algorithms; a new input shape costs a new search."""

    card: ClassVar[Card] = Card(
        stage=Stage.PROCESS,
        numerics=Numerics.ROUNDING,
        summary="convolution algorithms chosen by timing them",
        source="https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html#enable-cudnn-auto-tuner",
        unit_roundoff=2.0**-24,
        devices=("cuda",),
        step_memory="same",
        measured_on=("cuda",),
    )

    def apply(self, build: Build) -> None:
        """Switch the search on; refuse where it is on, or where deterministic algorithms were asked for."""
        import torch

        cudnn = torch.backends.cudnn
        build.require(not cudnn.benchmark, "cuDNN's search is already on")
        build.require(
            not cudnn.deterministic and not torch.are_deterministic_algorithms_enabled(),
            "you asked for deterministic algorithms, and the search may choose another one every time",
        )
        build.set_flag(cudnn, "benchmark", True)

    def plain(self) -> Plain:
        """PyTorch's own switch, set before the model is built."""
        return Plain(start=("torch.backends.cudnn.benchmark = True",), lightning={"benchmark": True})

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """Kernels that ran here and not in the reference; cuDNN's convolutions where no kernels are shown."""
        if not reference.kernels:
            count = sum(n for name, n in seen.operators.items() if "cudnn_conv" in name)
            if not count:
                raise Refused("it changed nothing: no convolution ran by cuDNN")
            return f"{NO_KERNELS}; the search is on, and {count} convolutions ran by cuDNN"
        new = sorted(seen.kernels.keys() - reference.kernels.keys())
        if not new:
            raise Refused("it changed nothing: cuDNN had already chosen the fastest algorithms")
        return f"{len(new)} kernels not in the reference"

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> list[Technique]:
        """Nothing for a model without convolutions."""
        return [cls()] if profile.operator_shares.get("convolution", 0.0) else []

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """cuDNN's guess is rarely worse than half of the best."""
        return (0.98, 1 / (1 - 0.5 * profile.operator_shares.get("convolution", 0.0)))
