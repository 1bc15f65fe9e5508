"""Take numbers below 1.2e-38, with which processors compute many times slower, for zero."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.technique import Build, Card, Numerics, Plain, Stage, Technique
from vivace.tensors.settings import hold

LEAST = 1e-5  # of a step's numbers
MOST_GAIN = 4.0


@dataclasses.dataclass(frozen=True)
class FlushDenormals(Technique):
    """Such numbers come up as a model is trained: in gradients behind a sharp attention, or of losses near
    zero, and in the optimizer's means of rows that are seldom seen. Acts on all threads that share an
    operator.
    """

    card: ClassVar[Card] = Card(
        stage=Stage.PROCESS,
        numerics=Numerics.ROUNDING,
        summary="numbers below 1.2e-38, with which a processor is slow, are taken for zero",
        source="https://docs.pytorch.org/docs/stable/generated/torch.set_flush_denormal.html",
        unit_roundoff=2.0**-24,
        devices=("cpu",),
        measured_on=("cpu",),
    )

    def apply(self, build: Build) -> None:
        """Set the mode; refuse where it is set, and where a processor or OpenMP does not take it."""
        from vivace.tensors.denormals import are_flushed, flush

        build.require(not are_flushed(), "this process takes denormal numbers for zero already")
        build.on_close(hold("denormals", are_flushed, flush, True))
        build.require(are_flushed(), "not every thread of PyTorch's takes denormal numbers for zero here")

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """Half of 1e-40, on every thread; that a step holds such numbers is for its time to say."""
        from vivace.errors import Refused
        from vivace.tensors.denormals import are_flushed

        if not are_flushed():
            raise Refused("it changed nothing: half of 1e-40 is not zero")
        return "half of 1e-40 is zero on every thread"

    def plain(self) -> Plain:
        """PyTorch's own call, before other threads begin."""
        return Plain(start=("torch.set_flush_denormal(True)",))

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> list[Technique]:
        """Nothing where the first steps hold hardly any."""
        return [cls()] if profile.features.get("denormals", 0.0) >= LEAST else []

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """One of them slows down every product that it goes into: their share bounds nothing."""
        return (1.0, MOST_GAIN)
