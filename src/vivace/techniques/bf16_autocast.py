"""Mixed precision: matrix products and convolutions in bfloat16, the rest in fp32."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.mechanisms.half_precision import (
    autocast,
    bfloat16_gain,
    left_in_half,
    require_bfloat16,
    share_in,
)
from vivace.technique import UNIT_ROUNDOFF, Build, Card, Numerics, Plain, Stage, Technique


@dataclasses.dataclass(frozen=True)
class Bf16Autocast(Technique):
    """The forward pass under `torch.autocast` to bfloat16; parameters and gradients stay in fp32.

    Weights are cast once a forward pass (autocast's cache). What the models return is in fp32 again. In an
    own step function only the models run in bfloat16: losses and what is between them keep full precision.
    On a processor short attention without dropout (up to 256 positions of heads of 64) stays in fp32, which
    is faster there except beside `batched_attention`.
    """

    card: ClassVar[Card] = Card(
        stage=Stage.PRECISION,
        numerics=Numerics.ROUNDING,
        summary="matrix products and convolutions in bfloat16 by autocast",
        source="https://docs.pytorch.org/docs/stable/amp.html",
        slot="precision",
        unit_roundoff=UNIT_ROUNDOFF["bfloat16"],
        measured_on=("cpu", "cuda"),
        on_shards="",
        lowers_peak=True,
    )

    def apply(self, build: Build) -> None:
        """Run the forward seam, or each model of an own step, under autocast."""
        import torch

        from vivace.tensors.modules import has_float32, modules_of
        from vivace.tensors.precision import autocasts_lstm

        require_bfloat16(build)
        layers = [layer for model in build.models for layer in modules_of(model, torch.nn.LSTM)]
        if build.device.type == "cpu" and has_float32(layers):
            reason = "PyTorch cannot run an LSTM under autocast on this processor: use bf16_weights"
            build.require(autocasts_lstm(), reason)
        autocast(build, torch.bfloat16)

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """The share of matrix and convolution inputs that were bfloat16."""
        return share_in("bfloat16", seen)

    def plain(self) -> Plain:
        """Autocast, to which trainers have a word."""
        return Plain(
            autocast="bfloat16",
            transformers={"bf16": True},
            lightning={"precision": "bf16-mixed"},
            accelerate={"mixed_precision": "bf16"},
            note=left_in_half("bfloat16"),
        )

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """Casts cost a part of what is not a product."""
        return bfloat16_gain(profile, machine, casts=0.3)
