"""BatchNorm folded into the convolution before it while the model is evaluated."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from vivace.errors import Refused
from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.technique import UNIT_ROUNDOFF, Build, Card, Numerics, Stage, Technique


@dataclasses.dataclass(frozen=True)
class FoldEval(Technique):
    """In evaluation, without gradients, a convolution and the BatchNorm behind it run as one convolution.

    Training steps, parameters and buffers are untouched; factors are worked out in every call, so that an
    evaluation sees the weights of the moment. It is for jobs that validate often: `tune` times training
    steps, which it leaves as they are, and does not propose it.
    """

    card: ClassVar[Card] = Card(
        stage=Stage.MODEL,
        numerics=Numerics.ROUNDING,
        summary="BatchNorm folded into convolutions in evaluation",
        source="https://arxiv.org/abs/1712.05877",
        unit_roundoff=UNIT_ROUNDOFF["float32"],
        measured_on=("cpu", "cuda"),
    )

    def apply(self, build: Build) -> None:
        """Find the pairs and let forwards in evaluation run them as one."""
        from vivace.techniques.fold_eval.folding import install

        found: set[str] = set()
        waiting = False
        for model in build.models:
            undo, later = install(model, found)
            build.on_close(undo)
            waiting = waiting or later
        names = " and ".join(type(model).__name__ for model in build.models)
        reason = "has a BatchNorm alone behind it, in a forward function that can be traced"
        build.require(found or waiting, f"no convolution of {names} {reason}")
        build.notes["folded_norms"] = found

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """How many BatchNorms evaluation runs without."""
        if not (count := len(seen.notes["folded_norms"])):
            raise Refused("it changed nothing: no BatchNorm was folded")
        return f"{count} BatchNorm{'s'[: count != 1]} folded in evaluation"

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> list[Technique]:
        """None: a training step takes as long as before."""
        return []
