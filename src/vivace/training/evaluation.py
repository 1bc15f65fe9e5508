"""The person's metric and pictures on the person's plain model, leaving no trace in the training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vivace.data.damage import Damage
from vivace.data.order import ordered
from vivace.errors import JobError
from vivace.job import Job
from vivace.pictures import document
from vivace.session.opening import call
from vivace.session.session import Session, place
from vivace.tensors.modules import in_evaluation
from vivace.tensors.randomness import SeededStreams, derive


class Evaluation:
    """Evaluates a Job's metric as often as it is asked to; the validation data are built once.

    The modules are in evaluation mode and gradients are off while the metric runs; afterwards every module's
    mode and all random streams are as before. Equal weights give equal metrics: the streams start alike each
    time, and the plan's techniques feed the same batches faster, or leave these data alone (`left_alone`).

    Args:
        job, session, seed: of the run.
        shortcut: gives the batches of the loader without it; None where it cannot.
    """

    def __init__(
        self, job: Job, session: Session, seed: int, shortcut: Callable[[Any], Any] = lambda _: None
    ) -> None:
        self.job = job
        self.session = session
        self.seed = seed
        self.shortcut = shortcut
        self._loader: Any = None

    def left_alone(self) -> dict[str, str]:
        """Why techniques that feed the training did not feed the last metric, by their names."""
        return dict(self.session.build.facts.validation_left_alone or {})

    def metric(self) -> float:
        """The metric now. Raises JobError where it or the validation data fail, or it is not finite."""
        return finite(self.job, self._asked("metric"))

    def pictures(self) -> dict[str, Any]:
        """What ``pictures.json`` holds of the model now. Raises JobError where the Job's function fails."""
        return document(self._asked("pictures"))

    def _asked(self, what: str) -> Any:
        """What the Job's `metric` or `pictures` says of the model and the held-out batches."""
        field = "validation" if self.job.validation is not None else "data"
        if self._loader is None or isinstance(self._loader, Iterator):
            with SeededStreams(derive(self.seed, "data")):
                self._loader = call(self.job, field)
        build = self.session.build
        streams = SeededStreams(derive(self.seed, "metric"), build.device)
        with in_evaluation(build.models), streams, torch.no_grad():
            seed, damage = derive(self.seed, "validation"), Damage.of(self.job)
            batches = self.shortcut(self._loader)
            if batches is None:
                batches = ordered(self._loader, seed=seed, epoch=0, damage=damage)
            fed = self.session.validation(batches)
            placed = (place(batch, device=build.device) for batch in fed if batch is not None)
            return call(self.job, what, self.session.built, placed)


def finite(job: Job, value: Any) -> float:
    """What the Job's metric returned, as a number. Raises JobError where it is none, or not finite."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        raise JobError(
            f"the Job's metric(model, batches) returned a {type(value).__name__}; it must return a number"
        ) from None
    if not math.isfinite(found):
        raise JobError(f"the Job's {job.metric_name} is {found}; it must be a finite number")
    return found
