"""Data parallelism: every process trains a copy on its own batches; gradients are averaged between them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from vivace.errors import Refused
from vivace.job import Batch
from vivace.ledger import Observation, Profile
from vivace.machine import Device, Machine
from vivace.technique import UNIT_ROUNDOFF, Build, Card, Numerics, Seam, Stage, Technique

if TYPE_CHECKING:
    import torch

OTHERS = (
    "other weights are trained now than when the session was opened, and the ranks exchange the gradients of "
    "those alone: open it again after weights were frozen or set free, which is to be between two steps"
)
BUCKETS_MIB = (5, 1, 100, 400)


@dataclasses.dataclass(frozen=True)
class DDP(Technique):
    """DistributedDataParallel around a shell whose forward is the loss: the model object and its keys stay.

    Ranks start from rank 0's weights, and rank 0's buffers are broadcast before each forward pass (PyTorch's
    default). The loss returned is the mean over ranks: one number, exchanged after the gradients were. All
    ranks weigh the same, so give them equal numbers of samples.
    """

    card: ClassVar[Card] = Card(
        stage=Stage.PARALLEL,
        numerics=Numerics.ROUNDING,
        summary="one process per GPU, gradients averaged while the backward pass runs",
        source="https://arxiv.org/abs/2006.15704",
        slot="ranks",
        unit_roundoff=UNIT_ROUNDOFF["float32"],
        measured_on=("cpu",),
        averages_ranks=True,
    )

    bucket_mib: Annotated[int, Field(ge=1)] = 25
    find_unused: bool = False

    def apply(self, build: Build) -> None:
        """Run the forward seam inside DistributedDataParallel and average the loss."""
        from torch.nn.parallel import DistributedDataParallel

        from vivace.tensors.exchange import mean_over_ranks, require_ranks
        from vivace.tensors.modules import Shell, has_batch_norm, trained_in

        model = build.model
        num_ranks = require_ranks(model)
        trained = build.exchanged = trained_in([model])
        build.require(trained, "no parameter is trained")
        if has_batch_norm(model, over_ranks=True):
            build.declare(Numerics.SEMANTICS, "BatchNorm takes its statistics over one rank's samples")
        shell = Shell(model, lambda batch: batch)
        parallel = [
            DistributedDataParallel(
                shell,
                bucket_cap_mb=self.bucket_mib,
                gradient_as_bucket_view=True,
                find_unused_parameters=self.find_unused,
            )
        ]

        def forward(following: Callable[[Any], torch.Tensor], batch: Batch) -> torch.Tensor:
            build.require(trained_in([model]) == trained, OTHERS)
            shell.function = following
            loss: torch.Tensor = parallel[0](batch)
            build.require(set(trained) >= {*trained_in([model])}, OTHERS)
            return loss

        build.wrap(Seam.FORWARD, forward)
        build.wrap(Seam.ACCUMULATING, lambda following: parallel[0].no_sync())
        build.wrap(Seam.GRADIENTS, mean_over_ranks)
        build.parallel = parallel
        build.on_close(parallel.clear)
        build.facts.ranks = num_ranks

    def confirm(self, seen: Observation, reference: Observation) -> str:
        """The number of ranks and the exchanges that ran."""
        found = [name for name in seen.operators if "allreduce" in name.replace("_", "").lower()]
        if not found:
            raise Refused("it changed nothing: no gradients were exchanged")
        return f"{seen.facts['ranks']} ranks, {', '.join(sorted(found)[:2])}"

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> list[Technique]:
        """In a search on several ranks, which have it in any case: sizes that make other buckets. In one
        process itself, which says how to use all devices, where there are several.
        """
        if profile.features.get("ranks", 1) == 1:
            return [cls()] if len(_alike(machine)) > 1 else []
        mib = profile.parameter_bytes / 2**20
        return [
            cls(bucket_mib=n) for n in BUCKETS_MIB if math.ceil(mib / n) != math.ceil(mib / cls.bucket_mib)
        ]

    @classmethod
    def gain(cls, profile: Profile, machine: Machine) -> tuple[float, float]:
        """Between nothing, where the exchange is all, and one share for each device; in a search on several
        ranks at best the exchange costs nothing.
        """
        if profile.features.get("ranks", 1) > 1:
            return (0.9, 1 / max(0.05, 1 - profile.shares["communication"]))
        return (0.5, float(len(_alike(machine))))


def _alike(machine: Machine) -> list[Device]:
    """The devices of the kind on which the job runs."""
    return [device for device in machine.devices if device.kind == machine.device.kind]
