"""The person's metric and pictures on the person's plain model, leaving no trace in the training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from vivace.data.damage import Damage
from vivace.data.hanging import HangWatch
from vivace.data.order import order_of, ordered, splits_by_rank
from vivace.errors import JobError, is_lost_worker
from vivace.job import Job
from vivace.pictures import document
from vivace.session.opening import call
from vivace.session.session import Session, place
from vivace.tensors.modules import in_evaluation
from vivace.tensors.randomness import SeededStreams, derive
from vivace.tensors.trees import batch_size
from vivace.torch_internals.loaders import end_workers_of
from vivace.training.crew import num_ranks
from vivace.training.losses import MOST_TRIES


class LeftOff(BaseException):
    """The evaluation was left between two batches, because the run is to stop. No ``except Exception`` of a
    person's metric takes it for an error.
    """


class Evaluation:
    """Evaluates a Job's metric as often as it is asked to; the validation data are built once.

    The modules are in evaluation mode and gradients are off while the metric runs; afterwards every module's
    mode and all random streams are as before. Equal weights give equal metrics: the streams start alike each
    time, and the plan's techniques feed the same batches faster, or leave these data alone (`left_alone`).

    Args:
        job, session, seed: of the run.
        shortcut: gives the batches of the loader without it; None where it cannot.
        damaged: where damaged samples of the validation data are listed; None: nowhere.
        hangs: watches how long a batch is waited for; None: nobody does.
    """

    def __init__(
        self,
        job: Job,
        session: Session,
        seed: int,
        shortcut: Callable[[Any], Any] = lambda _: None,
        *,
        damaged: Path | None = None,
        hangs: HangWatch | None = None,
    ) -> None:
        self.job = job
        self.session = session
        self.seed = seed
        self.shortcut = shortcut
        self.damage = Damage.of(job, damaged if job.validation is not None else None)
        self.hangs = hangs
        if hangs is not None:
            self.damage.reading = hangs.board.write
        self._loader: Any = None
        self._fed: Any = None  # the same in order, whose workers may live on
        self._num_read, self._left = 0, False
        self.lost_worker = ""  # what befell the newest worker that was lost

    def let_go(self) -> None:
        """Start workers that live on anew at the next evaluation."""
        self._fed = None

    def left_alone(self) -> dict[str, str]:
        """Why techniques that feed the training did not feed the last metric, by their names."""
        return dict(self.session.build.facts.validation_left_alone or {})

    def metric(self, must_stop: Callable[[], bool] = lambda: False) -> float:
        """The metric now. Raises JobError where it or the validation data fail, or it is not finite; and
        LeftOff where `must_stop` says so before a batch. It begins anew where a worker of the loader was
        killed, also because it hung.
        """
        for _ in range(MOST_TRIES):
            try:
                return finite(self.job, self._asked("metric", must_stop))
            except JobError as error:
                lost = error.__cause__
                if lost is None or not is_lost_worker(lost, from_workers=end_workers_of(lost)):
                    raise
                hung = self.hangs.found_in(self._loader) if self.hangs is not None else ""
                self._loader = None
                self.lost_worker = hung or "was killed"
        why = f"; the last one {hung}" if hung else " (memory may have run out)"
        raise JobError(
            f"a worker of the metric's loader was killed {MOST_TRIES} times in a row{why}: try num_workers=0"
        ) from lost

    def pictures(self) -> dict[str, Any]:
        """What ``pictures.json`` holds of the model now. Raises JobError where the Job's function fails."""
        return document(self._asked("pictures"))

    def _asked(self, what: str, must_stop: Callable[[], bool] = lambda: False) -> Any:
        """What the Job's `metric` or `pictures` says of the model and the held-out batches."""
        field = "validation" if self.job.validation is not None else "data"
        if self._loader is None or isinstance(self._loader, Iterator):
            with SeededStreams(derive(self.seed, "data")):
                self._loader, self._fed = call(self.job, field), None
            if num_ranks() > 1 and splits_by_rank(self._loader):
                raise JobError(
                    f"the {field}'s DistributedSampler gives each rank a part of the samples, and rank 0 "
                    "evaluates alone, on all of them: build the DataLoader without the sampler"
                )
        build = self.session.build
        streams = SeededStreams(derive(self.seed, "metric"), build.device)
        with streams, in_evaluation(build.models), torch.no_grad():
            seed = derive(self.seed, "validation")
            batches = self.shortcut(self._loader)
            if batches is None:
                source = self._loader if self._fed is None else self._fed
                batches = ordered(source, seed=seed, epoch=0, damage=self.damage)
                self._fed = batches if order_of(batches) is not None else None
            self._left = False
            fed = self._placed(self.session.validation(batches), must_stop)
            try:
                found = call(self.job, what, self.session.built, fed)
            finally:
                self.damage.require_few(self._num_read)
            if self._left:
                raise LeftOff  # whatever a metric makes of it that catches everything
            return found

    def _placed(self, batches: Iterable[Any], must_stop: Callable[[], bool]) -> Iterator[Any]:
        """The batches on the device, as long as the run is not to stop."""
        for batch in batches if self.hangs is None else self.hangs.watched(batches):
            if must_stop():
                self._left = True
                raise LeftOff
            if batch is not None:
                self._num_read += batch_size(batch)
                yield place(batch, device=self.session.build.device)


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
