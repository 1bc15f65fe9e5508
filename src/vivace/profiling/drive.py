"""A Job's own training loop under the recorder, in a child process; see `vivace.processes.launch`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from vivace.job import Batch, Job
from vivace.machine import Machine
from vivace.plan import Plan
from vivace.profiling.record.hooks import LoopHooks
from vivace.profiling.record.recorder import Recorder
from vivace.session.opening import call, checked_step, endless_batches, start
from vivace.session.session import Session

LONGEST_SECONDS = 300.0


class Driver:
    """Commands of the child: `begin` trains one step, and `run` until the recorder has seen enough."""

    def __init__(self, job: Job, machine: dict[str, Any]) -> None:
        self.job, self.machine = job, Machine.from_dict(machine)

    def begin(self, plan: dict[str, Any], folder: str, timed_seconds: float, strict: bool) -> None:
        """Make the model and the data, and train the first step. Raises JobError, Refused."""
        self._rest = self._train(plan, folder, timed_seconds, strict)
        next(self._rest)

    def run(self) -> dict[str, Any]:
        """Train a few steps; the record lies in the folder. Raises JobError, Refused."""
        (found,) = self._rest
        return found

    def _train(
        self, plan: dict[str, Any], folder: str, timed_seconds: float, strict: bool
    ) -> Iterator[dict[str, Any]]:
        recorder = Recorder(Path(folder), timed_seconds)
        with start(self.job, Plan.from_dict(plan), self.machine, strict=strict) as session:
            loader = call(self.job, "data")
            recorder.install()
            recorder.fetches.start()
            source = endless_batches(session, self.job, loader)
            with session.seams.observed(place=partial(_placing, recorder.hooks)):
                first = following(source, recorder.hooks)
                checked_step(session, first)
                yield {}  # until here it may take as long as the job's own code does
                deadline = time.monotonic() + LONGEST_SECONDS
                while not recorder.done and time.monotonic() < deadline:
                    _trained(session, following(source, recorder.hooks), recorder)
            recorder.finish()
            promise = session.promise.name.lower()
        yield {"promise": promise, "epochs": self.job.epochs}


def _trained(session: Session, batch: Batch, recorder: Recorder) -> None:
    """One step. A captured one shows no operators to count, and no update: the recorder is told of it."""
    if recorder.counts:
        session.plain_step(batch)
        return
    replays = session.build.facts.replays
    session.step(batch)
    if session.build.facts.replays != replays:
        recorder.hooks.replayed(session.optimizers[0])


def following(source: Iterator[Any], hooks: LoopHooks) -> Any:
    """The next batch, whatever kind of loader it comes from."""
    with hooks.fetching():
        batch = next(source)
    hooks.fetched(batch)
    return batch


def _placing(hooks: LoopHooks, place: Callable[[Any], Any], batch: Batch) -> Any:
    """Placing is a seam of its own; on a CPU no hook of torch shows it."""
    with hooks.phase("place"):
        return place(batch)
