"""The answer of `vivace verify`, as data."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Was the plan's promise kept? None: that could not be judged, and `reason` says why.

    `loss_envelopes` and `displacement_envelopes` are the largest distances from the reference, of losses and
    of everything else, in units of what rounding alone causes; `checks` holds every figure; `curves` the loss
    curves; `first` where a broken promise shows first: ``{quantity, layer, step}``, the layer None where it
    is the whole model.
    """

    kept: bool | None
    promise: str
    loss_envelopes: float
    displacement_envelopes: float
    steps: int
    seeds: int
    reason: str
    seconds: float = 0.0
    checks: tuple[dict[str, Any], ...] = ()
    num_checks: int = 0
    curves: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    metric: dict[str, Any] | None = None
    first: dict[str, Any] | None = None

    @property
    def judged(self) -> bool:
        """Is there an answer? Without one the promise is neither kept nor broken."""
        return self.kept is not None

    def to_dict(self) -> dict[str, Any]:
        """The document that ``vivace verify --json`` prints."""
        return dataclasses.asdict(self)
