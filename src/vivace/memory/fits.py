"""Which cards a job fits on, by its predicted peak."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vivace.job import Job
from vivace.memory.caching import MIB
from vivace.memory.predict import predict
from vivace.plan import Plan

CONTEXT_BYTES = 600 * MIB  # an allowance for the CUDA context and its libraries; not measured by this project
DRIVER_SHARE = 0.03  # of the nominal memory, which the driver keeps


@dataclasses.dataclass(frozen=True)
class Fit:
    """Does a job fit on a card? Bytes that it needs, with the context, and that the card leaves it."""

    card: str
    needed_bytes: int
    usable_bytes: int

    @property
    def fits(self) -> bool:
        """Is there room?"""
        return self.needed_bytes <= self.usable_bytes


def fits(job: Job, cards: Mapping[str, int], plan: Plan | None = None, batch: Any = None) -> list[Fit]:
    """For each card, by name and nominal bytes, whether a training step of `job` under `plan` fits on it.

    What is needed is what the caching allocator would reserve (`predict`). Raises Refused where the job
    cannot be predicted.
    """
    needed = predict(job, plan, batch=batch, device="cuda").reserved.reserved + CONTEXT_BYTES
    return [Fit(name, needed, int(size * (1 - DRIVER_SHARE))) for name, size in cards.items()]
