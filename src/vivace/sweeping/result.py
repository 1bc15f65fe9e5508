"""What a sweep found, as data."""

from __future__ import annotations

import dataclasses
from typing import Any

from vivace.events import metric_title
from vivace.sweeping.record import Finalist, TrialRecord, is_winner
from vivace.sweeping.space import Parameters


@dataclasses.dataclass(frozen=True)
class Swept:
    """What `vivace.sweep` found.

    `best` are the best parameters, and `finalists` the best configurations with their metric over seeds that
    the search has not seen; `winner` says whether the first of them is better than the others beyond the
    interval of their difference (None: not compared). `metric_data` says whether the metric is of
    ``validation`` or ``training`` data. `job` is the reference that `tune`, `train` and `verify` take, empty
    where the job came from no file.

    `importances` has for each parameter its share in what sets the best tenth of trials apart from all, with
    an 80 % interval over resampled trials. `front` are the numbers of the trials that no other beats in every
    objective. `fusing` tells of each group of runs that were, or could have been, trained as one; `packing`
    why `workers` trials ran at a time, 0 where none was left to run; `seconds` are those of this session.
    """

    job: str
    function: str
    metric_name: str
    objectives: tuple[str, ...]
    best: Parameters
    metric: float | None
    finalists: tuple[Finalist, ...]
    trials: tuple[TrialRecord, ...]
    importances: dict[str, dict[str, float]]
    front: tuple[int, ...]
    fusing: tuple[dict[str, Any], ...]
    epochs: int
    pruned_seconds_saved: float
    sampler: str
    pruner: str
    seed: int
    workers: int
    threads: int
    packing: dict[str, Any]
    plan: dict[str, dict[str, Any]]
    seconds: float
    date: str
    device: str
    out: str
    page_path: str
    notices: tuple[str, ...] = ()
    interrupted: bool = False
    metric_data: str | None = None

    @property
    def metric_title(self) -> str:
        """What the metric is called, which says where it is of the data that were trained on."""
        return metric_title(vars(self))

    @property
    def winner(self) -> bool | None:
        """Is the best configuration better than the next ones, as far as seeds tell?"""
        return is_winner(self.finalists)

    @property
    def failed(self) -> tuple[TrialRecord, ...]:
        """The trials that have no result."""
        return tuple(trial for trial in self.trials if trial.state == "failed")

    @property
    def pruned(self) -> tuple[TrialRecord, ...]:
        """The trials that were stopped before their end."""
        return tuple(trial for trial in self.trials if trial.state == "pruned")

    @property
    def complete(self) -> tuple[TrialRecord, ...]:
        """The trials that came to their end."""
        return tuple(trial for trial in self.trials if trial.state == "complete")

    @property
    def exit_code(self) -> int:
        """What the command ends with: 130 where it was interrupted, 1 where no trial has a result."""
        return 130 if self.interrupted else 0 if self.complete else 1

    def to_dict(self) -> dict[str, Any]:
        """The document that ``vivace sweep --json`` prints."""
        return {**dataclasses.asdict(self), "winner": self.winner}
