"""What a training takes beside its steps: evaluations of its metric, and checkpoints."""

from __future__ import annotations

import dataclasses
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from vivace.errors import VivaceError
from vivace.job import Batch, Job
from vivace.observing.observe import now
from vivace.session.opening import call
from vivace.session.session import Session
from vivace.tensors.loaders import known_length
from vivace.tensors.randomness import Streams, derive
from vivace.tensors.trees import bytes_of, tensors
from vivace.training.checkpoints import Checkpoints, Position
from vivace.training.evaluation import Evaluation
from vivace.training.resuming import state_of

EVALUATING_SECONDS = 2.0
FEWEST_BATCHES = 3  # of the metric: the first one of which is slower
LARGEST_BYTES = 256 * 2**20  # that are written to see how long a checkpoint takes


def evaluation_seconds(session: Session, job: Job, seconds: float = EVALUATING_SECONDS) -> float | None:
    """What one evaluation of the Job's metric takes; None where it has none, or where that fails.

    Where it takes longer than `seconds`, it is cut short, and foretold by the length of its data; where these
    have none, it is what was seen of it.
    """
    return tried_evaluation(session, job, seconds)[0]


def tried_evaluation(
    session: Session, job: Job, seconds: float = EVALUATING_SECONDS
) -> tuple[float | None, str]:
    """The same, and why the metric fails on all of its data; empty where it does not, or was cut short."""
    if job.metric is None:
        return None, ""
    timed, fault = _Timed(session, job, seconds), ""
    try:
        _evaluate(session, job, timed)
    except VivaceError as error:
        fault = "" if timed.cut else str(error)
    return timed.whole, fault


def _evaluate(session: Session, job: Job, timed: _Timed) -> None:
    with session.whole():
        with Streams(derive(0, "data")):
            loader = call(job, "data" if job.validation is None else "validation")
        timed.length = known_length(loader)
        one = dataclasses.replace(job, metric=timed, validation=lambda: loader)
        Evaluation(one, session, 0).metric()


class _Timed:
    """A Job's metric on as many batches as some seconds suffice for."""

    def __init__(self, session: Session, job: Job, limit: float) -> None:
        self.device, self.metric, self.limit = session.build.device, job.metric, limit
        self.length: int | None = None
        self.read = 0
        self.cut = False
        self.began = self.first = self.seconds = 0.0

    def __call__(self, model: Any, batches: Iterable[Batch]) -> Any:
        assert self.metric is not None
        self.began = now(self.device)
        try:
            return self.metric(model, self._some(batches))
        finally:
            self.seconds = now(self.device) - self.began

    def _some(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            yield batch
            self.read += 1
            passed = now(self.device) - self.began
            self.first = self.first or passed
            if passed > self.limit and self.read >= FEWEST_BATCHES:
                self.cut = True
                return

    @property
    def whole(self) -> float | None:
        """Seconds of all batches; None where none was read to its end."""
        if not self.read:
            return None
        if not self.cut or self.length is None:
            return self.seconds
        each = (self.seconds - self.first) / (self.read - 1)
        return self.first + each * max(0, self.length - 1)


def saving_seconds(session: Session, folder: Path) -> tuple[float, float]:
    """What a checkpoint takes on the disk of `folder`, and the trained model's file by its part of that.

    Of a large model only a part is written. Both are 0 where nothing can be written.
    """
    model, state = state_of(session.built), {"optimizer": state_of(session.optimizer)}
    sizes = [bytes_of(tensors(part)) for part in (model, state)]
    written: tuple[Any, Any] = (model, state)
    scale = sum(sizes) / LARGEST_BYTES
    if scale > 1.0:
        written = ({"part": torch.rand(LARGEST_BYTES // 4)}, {})
    place = folder / f"checkpoint.tmp.{uuid.uuid4().hex[:8]}"
    try:
        place.mkdir()
        begin = time.perf_counter()
        Checkpoints(place, {}).save(Position(step=1), *written)
        seconds = (time.perf_counter() - begin) * max(1.0, scale)
    except (VivaceError, OSError):
        return 0.0, 0.0
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return seconds, seconds * sizes[0] / max(1, sum(sizes))
