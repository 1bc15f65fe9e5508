"""Keep the optimizer's state in the host's memory between steps."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar

from pydantic import Field

from vivace import words
from vivace.errors import Refused
from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.technique import Build, Card, Numerics, Seam, Stage, Technique


@dataclasses.dataclass(frozen=True)
class OffloadOptimizer(Technique):
    """Momenta and other state in pinned host memory; the device updates `part_mib` of parameters at a time.

    The update runs on the device as before. A step copies the state once to the device and once back.
    """

    card: ClassVar[Card] = Card(
        stage=Stage.MEMORY,
        numerics=Numerics.EXACT,
        summary="optimizer state kept in the host's memory",
        source="https://arxiv.org/abs/2101.06840",
        devices=("cuda",),
        measured_on=("cuda",),
        saves_memory="states",
    )

    part_mib: Annotated[int, Field(ge=1)] = 64

    def apply(self, build: Build) -> None:
        """Replace the update seam by one that goes part by part."""
        from vivace.techniques.offload_optimizer.hosted import HostedState
        from vivace.tensors.optimizers import coupled

        build.require(build.model, "there is no model to update")
        optimizer = build.optimizer
        assert optimizer is not None
        build.require(not coupled(optimizer), coupled(optimizer))
        state = HostedState(optimizer, build.device, self.part_mib * 2**20)
        build.on_close(state.close)

        def update() -> None:
            state.update()
            build.notes["hosted_bytes"] = state.num_bytes

        build.replace(Seam.UPDATE, update)

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """The bytes of state in host memory."""
        count = seen.notes.get("hosted_bytes", 0)
        if not count:
            raise Refused("it changed nothing: the optimizer keeps no state")
        return f"{words.size(count)} of optimizer state in the host's memory"

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> list[Technique]:
        """Only where state of the parameters' size is a visible part of the memory."""
        return [cls()] if 10 * profile.parameter_bytes >= profile.peak_bytes else []

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """Two copies of the state a step, at 10 GB/s or better hidden."""
        copies = 4 * profile.parameter_bytes / 10e9
        return (profile.step_seconds / (profile.step_seconds + copies), 1.0)
