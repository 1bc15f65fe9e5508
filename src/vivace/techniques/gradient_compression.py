"""Send less over a slow link between ranks: gradients in bfloat16, or as matrices of low rank."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from vivace import words
from vivace.errors import Refused
from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.technique import UNIT_ROUNDOFF, Build, Card, Numerics, Stage, Technique

if TYPE_CHECKING:
    from torch import nn


@dataclasses.dataclass(frozen=True)
class GradientCompression(Technique):
    """Half of the bytes with ``bf16``; with ``powersgd`` a few per cent of those of large matrices.

    bf16 rounds each rank's gradient to 8 bits before the sum, and the sum again. PowerSGD keeps what a step
    left out and adds it to the next one; the first `exact_steps` are exchanged whole. What it kept is not in
    a checkpoint: a resumed run begins again with exact steps.
    """

    card: ClassVar[Card] = Card(
        stage=Stage.PARALLEL,
        numerics=Numerics.ROUNDING,
        summary="gradients exchanged between ranks in bfloat16 or at low rank",
        source="https://arxiv.org/abs/1905.13727",
        unit_roundoff=UNIT_ROUNDOFF["bfloat16"],
        measured_on=("cpu",),
        after=("ddp",),
    )

    method: Literal["bf16", "powersgd"] = "bf16"
    rank: Annotated[int, Field(ge=1)] = 4
    exact_steps: Annotated[int, Field(ge=2)] = 100

    def apply(self, build: Build) -> None:
        """Register PyTorch's communication hook on what the technique ddp has built."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        build.require(build.parallel, "no gradients are exchanged: it needs the technique ddp beside it")
        (parallel,) = build.parallel
        if self.method == "powersgd":
            build.declare(Numerics.SEMANTICS, "PowerSGD exchanges an approximation of the gradients")
            state = powerSGD_hook.PowerSGDState(None, self.rank, self.exact_steps)
            parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        else:
            parallel.register_comm_hook(None, default_hooks.bf16_compress_hook)
        whole = sum(p.numel() for p in parallel.parameters() if p.requires_grad)
        build.facts.exchanged_share = self._sent(parallel) / whole

    def _sent(self, parallel: nn.Module) -> float:
        """How many fp32 numbers' worth of bytes one exchange sends.

        As torch's hook does, a gradient that would not shrink below half goes whole, and so do vectors.
        """
        sizes = [tuple(p.shape) for p in parallel.parameters() if p.requires_grad]
        if self.method == "bf16":
            return sum(_count(size) for size in sizes) / 2
        small = [self._of_matrix(size) for size in sizes]
        whole = [_count(size) for size in sizes]
        return float(sum(a if 2 * a < b else b for a, b in zip(small, whole, strict=True)))

    def _of_matrix(self, size: tuple[int, ...]) -> int:
        """The numbers of the two thin matrices that stand for one gradient."""
        rows, columns = (size[0], _count(size[1:])) if len(size) > 1 else (1, _count(size))
        return (rows + columns) * min(rows, columns, self.rank)

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """The share of the bytes that is still sent."""
        if "exchanged_share" not in seen.facts:
            raise Refused("it changed nothing: no gradients were exchanged")
        if seen.facts["exchanged_share"] >= 1.0:
            raise Refused(f"it changed nothing: no gradient is large enough for rank {self.rank}")
        return f"{words.percent(seen.facts['exchanged_share'])} of the bytes exchanged, by {self.method}"

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> list[Technique]:
        """Between ranks: bfloat16 first, then low rank."""
        return [cls(), cls(method="powersgd")] if profile.features.get("ranks", 1) > 1 else []

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """At best the exchange costs nothing; with one process there is none."""
        exchange = profile.shares.get("communication", 0.0)
        return (0.9, 1 / max(0.05, 1 - exchange)) if exchange else (1.0, 1.0)


def _count(size: tuple[int, ...]) -> int:
    count = 1
    for length in size:
        count *= length
    return count
