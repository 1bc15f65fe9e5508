"""What `vivace export` wrote, and the proof of it."""

from __future__ import annotations

import dataclasses
from typing import Any

from vivace.errors import AnswerIsNo

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Exported:
    """The model card: what the file is, of which training, how it was proven, and how fast it was.

    `kept` is the answer of the proof: does the file, in a fresh process, do what the trained model does?
    `checks` hold each output's distance from the model's (see `serving.envelope.Check`), `layers` under
    ``checks`` that of each layer that stands in the file, in the order of the model, of how many, and under
    ``reason`` why none could be told; `change` what the metric loses with the file's own outputs, `measured`
    what `vivace compress` measured of it. `unused` are the places of outputs that the metric does not use,
    where it decides. `metric` is the job's, of the model as the job builds it now with the run's weights;
    where it was asked of fewer samples, or of other data, it is that of the run. `notes` are sentences that a
    reader has to know.
    """

    job: str
    runtime: str
    form: str
    numbers: str
    file: str
    hashes: dict[str, str]
    kept: bool
    reason: str
    samples: int
    batches: tuple[int, ...]
    checks: tuple[dict[str, Any], ...]
    layers: dict[str, Any]
    change: dict[str, Any] | None
    inputs: tuple[dict[str, Any], ...]
    trained: dict[str, Any]
    measured: dict[str, Any]
    machine: dict[str, Any]
    versions: dict[str, str]
    date: str
    page_path: str = ""
    unused: tuple[int, ...] = ()
    metric: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0, or 1 where the file is not the model."""
        return 0 if self.kept else AnswerIsNo.exit_code

    def to_dict(self) -> dict[str, Any]:
        """The document that ``vivace export --json`` prints, and that lies beside the file."""
        return {"format": FORMAT, **dataclasses.asdict(self)}
