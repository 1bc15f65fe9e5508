"""Keep what blocks save for the backward pass in the host's memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated, ClassVar

from pydantic import Field

from vivace import words
from vivace.errors import Refused
from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.technique import Build, Card, Numerics, Stage, Technique, Way


@dataclasses.dataclass(frozen=True)
class OffloadActivations(Technique):
    """Tensors that the matching blocks save go to pinned host memory and come back, on a side stream.

    Bytes are copied, so no bit changes. The copies hide behind computation where the link is fast enough.
    `blocks` are names or patterns such as ``layer3.*``; smaller tensors than `smallest_kib` stay.
    """

    card: ClassVar[Card] = Card(
        stage=Stage.MEMORY,
        numerics=Numerics.EXACT,
        summary="activations kept in the host's memory until the backward pass",
        source="https://arxiv.org/abs/1602.08124",
        devices=("cuda",),
        measured_on=("cuda",),
        saves_memory="activations",
        by_block=True,
    )

    blocks: tuple[str, ...] = ("*",)
    smallest_kib: Annotated[int, Field(ge=1)] = 1024

    def apply(self, build: Build) -> None:
        """Take over the calls of the blocks."""
        from vivace.mechanisms.blocks import claim
        from vivace.mechanisms.saved_tensors import HostStore

        store = HostStore(build, self.name, 1024 * self.smallest_kib)
        chosen = claim(build, self.blocks, self.name, store.around)
        build.notes["offloaded_blocks"] = len(chosen)
        build.notes["offloaded_bytes"] = store.spared

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """The number of blocks, and the bytes that went to the host."""
        spared = sum(seen.notes.get("offloaded_bytes", {}).values())
        if not spared:
            raise Refused("it changed nothing: no block saved a tensor that is large enough")
        return f"{seen.notes['offloaded_blocks']} blocks keep {words.size(spared)} in the host's memory"

    @classmethod
    def ways(cls, build: Build, block: str) -> dict[str, Way]:
        """Every tensor that is large enough."""
        from vivace.mechanisms.saved_tensors import HostStore

        store = HostStore(build, cls.name, 1024 * cls.smallest_kib)
        return {"offload": Way(store.around, store.spared)}

    @classmethod
    def deciding(cls, chosen: Callable[..., tuple[str, ...]]) -> Technique:
        """Offload the activations of the chosen blocks only."""
        return cls(blocks=chosen("offload"))

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> list[Technique]:
        """Only where activations are most of the memory."""
        return [cls()] if profile.peak_bytes >= 4 * max(1, profile.parameter_bytes) else []

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """From all copies waited for to all copies hidden."""
        return (0.3, 1.0)
