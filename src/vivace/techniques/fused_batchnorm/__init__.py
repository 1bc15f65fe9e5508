"""BatchNorm, what is added to it and its activation as one: less traffic of feature maps."""

from __future__ import annotations

import dataclasses
from collections import Counter
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

from vivace.errors import Refused
from vivace.ledger import Observation, Profile
from vivace.machine import Machine
from vivace.technique import UNIT_ROUNDOFF, Build, Card, Numerics, Stage, Technique

if TYPE_CHECKING:
    from torch import nn


@dataclasses.dataclass(frozen=True)
class FusedBatchnorm(Technique):
    """Triton kernels, forward and backward, for training BatchNorm with the addition and activation behind.

    A BatchNorm whose result is added to another's runs in that one's kernels, and where two parts of a
    network read a result, the backward kernels add both gradients.

    They are found in the model's own forward functions; eval mode and whatever does not match runs as it
    was written. Feature maps are kept in NHWC memory order, so it goes well with channels_last; a ReLU leaves
    one bit an element for the backward pass. Without `cuda_graph_step` the processor may not launch its
    kernels fast enough: on an H200 ResNet-50 at batch 256 was slower with it. `products`: 1x1 convolutions
    in front of a BatchNorm run as matrix products that leave its statistics, which was no gain on an H200.
    """

    card: ClassVar[Card] = Card(
        stage=Stage.MODEL,
        numerics=Numerics.ROUNDING,
        summary="BatchNorm, addition and activation in one kernel each way",
        source="https://arxiv.org/abs/1502.03167",
        unit_roundoff=UNIT_ROUNDOFF["float32"],
        devices=("cuda",),
        measured_on=("cuda",),
    )

    products: bool = False

    def apply(self, build: Build) -> None:
        """Find the chains and put fused forwards in the place of the modules' own."""
        import torch
        from torch import nn

        from vivace.techniques.fused_batchnorm.matching import NORMS, Chain, install
        from vivace.tensors.modules import modules_of

        build.require(
            build.device.type != "cuda" or find_spec("triton") is not None, "its kernels need Triton"
        )
        for model in build.models:
            for name, module in model.named_modules():
                synchronised = isinstance(module, nn.SyncBatchNorm)
                build.require(not synchronised, f"'{name}' is a SyncBatchNorm, which sums over processes")
        names = " and ".join(type(model).__name__ for model in build.models)
        found = [m for model in build.models for m in modules_of(model, *NORMS)]
        build.require(found, f"{names} has no BatchNorm of images{_instead(build.models)}")
        double = any(p.dtype == torch.float64 for m in found for p in (*m.parameters(), *m.buffers()))
        build.require(not double, "BatchNorm is in float64 here, and the kernels sum in float32")
        chains: dict[int, Chain] = {}
        waiting = False
        for model in build.models:
            undo, later = install(model, chains, products=self.products)
            build.on_close(undo)
            waiting = waiting or later
        followed = "is followed by an addition or activation of its own"
        build.require(chains or waiting, f"no BatchNorm of {names} {followed}")
        products = waiting or not self.products or any(chain.product for chain in chains.values())
        wanted = "channels in eights, no bias, and a BatchNorm alone behind it"
        build.require(products, f"no 1x1 convolution of {names} has {wanted}: leave products off")
        build.notes["fused_chains"] = chains
        build.notes["batch_norms"] = len(found)

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """The chains that ran as one, by what they are made of."""
        names = ("vivace::batch_norm_apply", "vivace::statistics_mm")
        calls, products = (seen.operators.get(name, 0) for name in names)
        if not calls:
            raise Refused("it changed nothing: no BatchNorm ran fused")
        if self.products and not products:
            raise Refused("no 1x1 convolution left statistics: leave products off")
        kinds = Counter(str(chain) for chain in seen.notes["fused_chains"].values())
        parts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        return f"{calls} fused calls a step, of {seen.notes['batch_norms']} BatchNorms: {parts}"

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> list[Technique]:
        """Networks with BatchNorm on a GPU; not `products`, which were slower on an H200."""
        wanted = machine.device.kind == "cuda" and profile.features.get("batch_norm")
        return [cls()] if wanted else []

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """Additions and activations vanish; the norm's own passes stay, and may be slower than cuDNN's."""
        shares = profile.operator_shares
        norm = shares.get("norm", 0.0)
        if machine.device.kind != "cuda" or not profile.features.get("batch_norm"):
            return (1.0, 1.0)
        spared = 0.9 * shares.get("elementwise", 0.0) + 0.2 * norm
        return (1 / (1 + 0.5 * norm), 1 / (1 - min(0.6, spared)))


def _instead(models: list[nn.Module]) -> str:
    """Which other normalisation the models have, as a part of a sentence."""
    kinds = {type(m).__name__ for model in models for m in model.modules()}
    others = sorted(kind for kind in kinds if kind.rstrip("123d").endswith("Norm"))
    return f"; it has {', '.join(others)}" if others else ""
