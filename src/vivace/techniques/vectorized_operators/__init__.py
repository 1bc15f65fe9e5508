"""Operators that PyTorch computes a number at a time on a CPU, by vector instructions: the same bits."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from vivace.errors import Refused
from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.operators import LEAST_ONE_BY_ONE
from vivace.technique import Build, Card, Numerics, Stage, Technique

SECONDS_A_NUMBER = 2e-9  # of PyTorch's kernels, which choose, compare or add numbers one by one


@dataclasses.dataclass(frozen=True)
class VectorizedOperators(Technique):
    """Five operators on a CPU compute by whole vectors of numbers, bit for bit as PyTorch does.

    `where` and `masked_fill`, as in attention that is written out and in losses with masks; max pooling of
    feature maps that are not in channels-last order; gradients of rows that are picked by an index, as in
    graph networks, in the order of the rows, as PyTorch's deterministic algorithms add them; gradients of
    `PReLU`. PyTorch's kernels of these take numbers one by one. Functions, modules and what autograd calls
    take part. What is compiled has kernels of its own. Acts on the whole process.
    """

    card: ClassVar[Card] = Card(
        stage=Stage.PROCESS,
        numerics=Numerics.EXACT,
        summary="masks, max pooling and picked rows by vector instructions, bit for bit the same",
        source="https://docs.pytorch.org/docs/stable/library.html",
        devices=("cpu",),
        measured_on=("cpu",),
        uncompiled=True,
    )

    def apply(self, build: Build) -> None:
        """Compile the kernels where this machine has none yet, and put them in the place of PyTorch's."""
        from vivace.techniques.vectorized_operators.operators import begin

        counts: dict[str, int] = {}
        build.notes["vectorized_operators"] = counts

        def told(name: str, numbers: int) -> None:
            counts[name] = max(counts.get(name, 0), numbers)

        try:
            build.on_close(begin(told))
        except OSError as error:
            raise Refused(f"its C code could not be compiled: {error}") from error

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """Which operators it computed, of up to how many numbers."""
        counts = seen.notes["vectorized_operators"]
        if not counts:
            raise Refused(
                f"it changed nothing: no such operator ran on {LEAST_ONE_BY_ONE:,} numbers or more on the CPU"
            )
        return ", ".join(f"{name} of up to {numbers:,} numbers" for name, numbers in sorted(counts.items()))

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> list[Technique]:
        """Where a step runs such operators on many numbers."""
        return [cls()] if profile.features.get("one_by_one", 0) >= LEAST_ONE_BY_ONE else []

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """Nearly all of the time that these operators take goes."""
        spared = profile.features.get("one_by_one", 0) * SECONDS_A_NUMBER / profile.step_seconds
        return (1.0, 1 / (1 - min(0.8, spared)))
