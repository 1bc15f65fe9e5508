"""Recompute the activations of blocks in the backward pass instead of keeping them."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable
from typing import ClassVar

from vivace import words
from vivace.errors import Refused
from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.technique import Build, Card, Numerics, Plain, Stage, Technique, Way


@dataclasses.dataclass(frozen=True)
class Checkpoint(Technique):
    """The blocks whose names match keep their inputs alone; the backward pass runs each once more.

    The second pass draws the same random numbers, leaves BatchNorm's statistics alone and changes no bit of
    the gradients. `blocks` are names or patterns such as ``layer3.*``; blocks are found in the module tree.
    Those that match `cheap` keep the results of their matrix products and convolutions as well, and run
    the rest again.
    """

    card: ClassVar[Card] = Card(
        stage=Stage.MEMORY,
        numerics=Numerics.EXACT,
        summary="activations of blocks computed again in the backward pass instead of kept",
        source="https://arxiv.org/abs/1604.06174",
        measured_on=("cpu", "cuda"),
        on_shards="",
        saves_memory="activations",
        by_block=True,
    )

    blocks: tuple[str, ...] = ("*",)
    cheap: tuple[str, ...] = ()

    def apply(self, build: Build) -> None:
        """Take over the calls of the blocks."""
        from vivace.mechanisms.blocks import claim
        from vivace.mechanisms.recompute import Recomputer

        cheap = set[str]()
        recomputer = Recomputer(build.device, self.name, cheap)
        chosen = claim(build, self.blocks, self.name, recomputer.around)
        names = [block.name for block in chosen]
        for pattern in self.cheap:
            found = fnmatch.filter(names, pattern)
            build.require(found, f"none of its blocks is called '{pattern}'; they are {', '.join(names[:4])}")
            cheap.update(found)
        build.notes["recomputed_blocks"] = len(chosen)
        build.notes["released_bytes"] = recomputer.released

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """The number of blocks, and what they did not keep."""
        released = sum(seen.notes.get("released_bytes", {}).values())
        if not released and not seen.compiled_graphs:
            raise Refused("it changed nothing: no block let go of any activation")
        count = seen.notes["recomputed_blocks"]
        return f"{count} blocks run again in the backward pass instead of keeping {words.size(released)}"

    @classmethod
    def ways(cls, build: Build, block: str) -> dict[str, Way]:
        """Wholly, or but for the results of matrix products and convolutions."""
        from vivace.mechanisms.recompute import Recomputer

        whole, cheap = (Recomputer(build.device, cls.name, names) for names in ((), (block,)))
        return {"recompute": Way(whole.around, whole.released), "cheap": Way(cheap.around, cheap.released)}

    @classmethod
    def deciding(cls, chosen: Callable[..., tuple[str, ...]]) -> Technique:
        """The blocks of both ways, of which some keep what is expensive."""
        return cls(blocks=chosen("recompute", "cheap"), cheap=chosen("cheap"))

    def plain(self) -> Plain | None:
        """Hugging Face's Trainer recomputes whole models; others, and chosen blocks, are written by hand."""
        if self.blocks != ("*",) or self.cheap:
            return None
        return Plain(
            transformers={"gradient_checkpointing": True},
            note="Hugging Face's models have gradient_checkpointing_enable(); in another one call each block "
            "as torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)",
        )

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> list[Technique]:
        """Only where activations are most of the memory."""
        return [cls()] if profile.peak_bytes >= 4 * max(1, profile.parameter_bytes) else []

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """The forward pass once more; no technique for speed alone."""
        return (1 / (1 + 1.2 * profile.shares.get("forward", 0.3)), 1.0)
