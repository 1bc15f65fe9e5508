"""Keep what blocks save for the backward pass in 16 or 8 bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar, Literal

from vivace import words
from vivace.errors import Refused
from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.technique import UNIT_ROUNDOFF, Build, Card, Numerics, Stage, Technique, Way


@dataclasses.dataclass(frozen=True)
class CompressActivations(Technique):
    """Large fp32 tensors that the matching blocks save become bfloat16 or int8; the forward pass stays.

    Only gradients are rounded. An int8 value is off by at most 1/252 of the largest of its 256 neighbours,
    which no unit roundoff bounds: that is SEMANTICS. `blocks` are names or patterns such as ``layer3.*``.
    """

    card: ClassVar[Card] = Card(
        stage=Stage.MEMORY,
        numerics=Numerics.ROUNDING,
        summary="activations kept for the backward pass in bfloat16 or int8",
        source="https://arxiv.org/abs/2104.14129",
        unit_roundoff=UNIT_ROUNDOFF["bfloat16"],
        measured_on=("cpu", "cuda"),
        saves_memory="activations",
        by_block=True,
    )

    blocks: tuple[str, ...] = ("*",)
    dtype: Literal["bfloat16", "int8"] = "bfloat16"

    def apply(self, build: Build) -> None:
        """Take over the calls of the blocks."""
        from vivace.mechanisms.blocks import claim
        from vivace.mechanisms.saved_tensors import Bfloat16Store, Int8Store

        store = Bfloat16Store(build, self.name) if self.dtype == "bfloat16" else Int8Store(build, self.name)
        chosen = claim(build, self.blocks, self.name, store.around)
        if self.dtype == "int8":
            build.declare(Numerics.SEMANTICS, "an int8 error is relative to the largest of 256 neighbours")
        build.notes["compressed_blocks"] = len(chosen)
        build.notes["compressed_bytes"] = store.spared

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """The number of blocks, and the bytes that they spared."""
        spared = sum(seen.notes.get("compressed_bytes", {}).values())
        if not spared:
            raise Refused("it changed nothing: no block saved a large fp32 tensor")
        count = seen.notes["compressed_blocks"]
        return f"{count} blocks keep {words.size(spared)} less for the backward pass, in {self.dtype}"

    @classmethod
    def ways(cls, build: Build, block: str) -> dict[str, Way]:
        """In bfloat16; int8 would be SEMANTICS."""
        from vivace.mechanisms.saved_tensors import Bfloat16Store

        store = Bfloat16Store(build, cls.name)
        return {"compress": Way(store.around, store.spared)}

    @classmethod
    def deciding(cls, chosen: Callable[..., tuple[str, ...]]) -> Technique:
        """Compress the activations of the chosen blocks only."""
        return cls(blocks=chosen("compress"))

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> list[Technique]:
        """Only where activations are most of the memory."""
        return [cls()] if profile.peak_bytes >= 4 * max(1, profile.parameter_bytes) else []

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """Two more passes over the activations; no technique for speed."""
        return (0.6, 1.0)
