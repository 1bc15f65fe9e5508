"""Attention on a CPU by products of many heads at once."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from vivace.errors import Refused
from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.mechanisms.half_precision import computes_bfloat16
from vivace.operators import LEAST_DROPPED, LEAST_DROPPED_FLOAT, LEAST_SCORES, MOST_KEYS
from vivace.technique import UNIT_ROUNDOFF, Build, Card, Numerics, Stage, Technique

SECONDS_A_SCORE = 12e-9  # of PyTorch's kernel in float32, forward and backward


@dataclasses.dataclass(frozen=True)
class BatchedAttention(Technique):
    """Attention of a training step on a CPU: matrix products of many heads at once, and one pass over scores.

    PyTorch's kernel takes small blocks of queries and keys, of which products in bfloat16 are slower than in
    float32; where weights are dropped it has no kernel and writes attention out in float32. Here scores of as
    many heads as a cache holds come from one product, and a pass of C code makes weights of them, with the
    mask and what is dropped; scores are computed again for the gradients. Acts on what
    `scaled_dot_product_attention` is given for gradients, in bfloat16 or with dropped weights, in the whole
    process.
    """

    card: ClassVar[Card] = Card(
        stage=Stage.PROCESS,
        numerics=Numerics.ROUNDING,
        summary="attention by matrix products of many heads at once",
        source="https://arxiv.org/abs/2205.14135",
        unit_roundoff=UNIT_ROUNDOFF["float32"],
        devices=("cpu",),
        measured_on=("cpu",),
        uncompiled=True,
    )

    def apply(self, build: Build) -> None:
        """Compile the C code where this machine has none yet, and put it in the place of PyTorch's."""
        from vivace.techniques.batched_attention.attention import begin

        scores: list[int] = []
        build.notes["batched_attention"] = scores

        def told(number: int) -> None:
            scores[:] = [max([number, *scores])]

        try:
            build.on_close(begin(told))
        except OSError as error:
            raise Refused(f"its C code could not be compiled: {error}") from error

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """Of up to how many scores."""
        scores: list[int] = seen.notes["batched_attention"]
        if not scores:
            raise Refused(
                f"it changed nothing: no attention of {LEAST_SCORES:,} scores or more in bfloat16 was "
                f"computed for gradients on the CPU, nor with dropped weights of {LEAST_DROPPED:,} in "
                f"bfloat16 or {LEAST_DROPPED_FLOAT:,} in float32; that of more than {MOST_KEYS:,} keys stays "
                "PyTorch's"
            )
        return f"attention of up to {scores[0]:,} scores by products of many heads"

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> list[Technique]:
        """Where a step attends, in a way that is slow here or in bfloat16 would be."""
        attends = profile.features.get("attention_scores", 0) >= LEAST_SCORES
        slow = profile.features.get("slow_attention") or computes_bfloat16(machine)
        return [cls()] if attends and slow else []

    def company(self, profile: Profile, machine: Machine) -> list[dict[str, dict[str, Any]]]:
        """In fp32 PyTorch's own kernel is faster, unless weights are dropped."""
        alone: list[dict[str, dict[str, Any]]] = [{}] if profile.features.get("slow_attention") else []
        if profile.features.get("dtype") != "float32" or not computes_bfloat16(machine):
            return alone
        return [*alone, {"bf16_autocast": {}}, {"bf16_weights": {}}]

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """Half of the time that attention takes may go."""
        taken = profile.features.get("attention_scores", 0) * SECONDS_A_SCORE / profile.step_seconds
        return (1.0, 1 / (1 - 0.5 * min(1.0, taken)))
