"""Branches of a network that do not need each other, side by side on CUDA streams."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from vivace.job import Batch
from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.technique import UNIT_ROUNDOFF, Build, Card, Numerics, Seam, Stage, Technique


@dataclasses.dataclass(frozen=True)
class BranchStreams(Technique):
    """Parallel branches, such as Inception's, run on streams of their own, in both directions.

    They are found in the model's forward functions. Kernels that fill the GPU gain nothing by it; small ones
    may, above all as parallel paths of a captured step. What it brings by itself has not
    been measured on a GPU yet.
    """

    card: ClassVar[Card] = Card(
        stage=Stage.MODEL,
        numerics=Numerics.ROUNDING,  # gradients of what the branches share are added up in another order
        summary="independent branches side by side on CUDA streams",
        source="https://arxiv.org/abs/2012.02732",
        unit_roundoff=UNIT_ROUNDOFF["float32"],
        devices=("cuda",),
        measured_on=("cuda",),
    )

    def apply(self, build: Build) -> None:
        """Find the joins, and put forwards with streams in the place of the modules' own."""
        from vivace.techniques.branch_streams.branches import come_back, install

        joins: dict[int, list[int]] = {}
        for model in build.models:
            build.on_close(install(model, joins))
        names = " and ".join(type(model).__name__ for model in build.models)
        build.require(joins, f"{names} has no branches with weights that a trace shows to be independent")

        def run(following: Callable[[Any], Any], batch: Batch) -> Any:
            try:
                return following(batch)
            finally:
                come_back()

        build.wrap(Seam.STEP if build.own_step else Seam.FORWARD, run)
        build.notes["parallel_joins"] = joins

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """The number of joins, and of branches in all."""
        counts = [count for found in seen.notes["parallel_joins"].values() for count in found]
        return f"{sum(counts)} branches side by side, which join at {len(counts)} places"

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> list[Technique]:
        """Networks of images on a GPU; whether there are branches, applying it finds out."""
        wanted = machine.device.kind == "cuda" and profile.features.get("convolution_2d")
        return [cls()] if wanted else []

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """Waiting for events costs a little; nothing is moved less often."""
        return (0.9, 1.3) if machine.device.kind == "cuda" else (1.0, 1.0)
