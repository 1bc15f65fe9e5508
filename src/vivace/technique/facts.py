"""Facts of the step that techniques tell each other and the core; see `Build.facts`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass
class Facts:
    """Each is set by the technique that makes it so, and read by all; None where no technique does.

    Args:
        batches_per_step: how many of the loader's batches a step takes.
        exchanged_share: of the gradients' bytes, where fewer or more go from rank to rank.
        pieces: in how many pieces a batch was cut at most; 0 before the first step.
        ranks: how many processes average their gradients.
        replays: how many steps ran from a recording, which shows no operators and no update.
        sharded_blocks: of the model, whose weights each rank gathers and gives back one block at a time.
        skipped_steps: how many steps loss scaling has skipped, on the host or on the device.
        updates_in_backward: how many weights were updated inside of backward passes.
        validation_left_alone: why techniques that feed the training do not feed the metric, by their names.
    """

    batches_per_step: int = 1
    exchanged_share: float | None = None
    pieces: int | None = None
    ranks: int | None = None
    replays: int | None = None
    sharded_blocks: int | None = None
    skipped_steps: int | torch.Tensor | None = None
    updates_in_backward: int | None = None
    validation_left_alone: dict[str, str] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Those that are known, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}
