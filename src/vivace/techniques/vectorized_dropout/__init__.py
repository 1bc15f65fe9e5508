"""The masks of dropout drawn a block at a time: the same bits, by vector instructions."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from vivace.errors import Refused
from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.operators import LEAST_MASK
from vivace.technique import Build, Card, Numerics, Stage, Technique

SECONDS_A_NUMBER = 6e-9  # of PyTorch's kernel, which draws them one by one


@dataclasses.dataclass(frozen=True)
class VectorizedDropout(Technique):
    """Dropout on a CPU draws its masks a block of random numbers at a time, bit for bit as PyTorch does.

    PyTorch draws them one by one on processors that are not Intel's: a mask takes longer there than the layer
    around it. Everything that calls `bernoulli_` with a probability takes part, also in functions and in
    attention; the state of PyTorch's generator goes on as it would. What is compiled draws by itself. Acts on
    the whole process.
    """

    card: ClassVar[Card] = Card(
        stage=Stage.PROCESS,
        numerics=Numerics.EXACT,
        summary="dropout's masks drawn by vector instructions, bit for bit the same",
        source="https://doi.org/10.1145/272991.272995",
        devices=("cpu",),
        measured_on=("cpu",),
        uncompiled=True,
    )

    def apply(self, build: Build) -> None:
        """Compile the generator where this machine has none yet, and put it in PyTorch's place."""
        from vivace.techniques.vectorized_dropout.masks import begin, draws_alike

        try:
            alike = draws_alike()
        except OSError as error:
            raise Refused(f"its C code could not be compiled: {error}") from error
        build.require(alike, "PyTorch draws other masks than its own generator's here, as by MKL on Intel's")
        build.notes["largest_mask"] = 0

        def told(numbers: int) -> None:
            build.notes["largest_mask"] = max(build.notes["largest_mask"], numbers)

        build.on_close(begin(told))

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """How many numbers the largest mask had that was drawn in blocks."""
        largest = seen.notes["largest_mask"]
        if not largest:
            raise Refused(
                f"it changed nothing: no mask of {LEAST_MASK:,} numbers or more was drawn on the CPU"
            )
        return f"masks of up to {largest:,} numbers drawn in blocks"

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> list[Technique]:
        """Where a step draws masks of a useful size, on a processor that is not Intel's."""
        intel = any("Intel" in one.name for one in machine.devices if one.kind == "cpu")
        return [cls()] if profile.features.get("mask_numbers", 0) >= LEAST_MASK and not intel else []

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """Nearly all of the time that the masks take goes."""
        spared = profile.features.get("mask_numbers", 0) * SECONDS_A_NUMBER / profile.step_seconds
        return (1.0, 1 / (1 - min(0.8, spared)))
