"""How a run is to be trained, whatever its job and its plan."""

from __future__ import annotations

import dataclasses
from typing import Literal

from vivace.training.ranks import PATIENCE_SECONDS

Changed = Literal["refuse", "ok"]
OnNan = Literal["rollback", "stop"]
LARGEST_SEED = 2**64 - 1  # as torch's generators take it


@dataclasses.dataclass(frozen=True)
class Options:
    """How long to train and how often to save; see `vivace.train`."""

    seed: int = 0
    max_steps: int | None = None
    checkpoint_every_seconds: float = 600.0
    checkpoint_every_steps: int | None = None
    rank_timeout_seconds: float = PATIENCE_SECONDS
    deadline_seconds: float | None = None
    changed: Changed = "refuse"
    on_nan: OnNan = "rollback"
    restart: bool = False
