"""A trial in a process of its own: the child's side. It is a run of `vivace train`, asked at each epoch."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import torch

from vivace.errors import ChildFailed, JobError, Refused
from vivace.events import Event, EventKind
from vivace.job import Job, JobFunction
from vivace.plan import Plan
from vivace.processes.child import ask_parent
from vivace.sweeping.folder import CHECKPOINTS, PLAN, can_go_on
from vivace.training.checkpoints import whole_manifest
from vivace.training.training import Run
from vivace.watching.tally import Tally
from vivace.watching.watched import train

ENTRY = "vivace.sweeping.trial:Trial"
CHECKPOINT_SECONDS = 120.0  # what a kill can cost at most


class Pruned(Exception):
    """The parent said that this trial need not go on."""


class Trial:
    """Serves `vivace.processes.launch.Child`: each method is a command with JSON arguments and answer."""

    def __init__(self, job: JobFunction, threads: int) -> None:
        torch.set_num_threads(threads)
        self.job = job
        self._num_epochs = 0
        self._num_parameters: int | None = None  # before the model is built
        self._plan: dict[str, Any] = {}
        self._declined, self._out = "", Path()
        self._epoch: dict[str, Any] = {}  # what the last one brought

    def train(self, parameters: dict[str, Any], plan: dict[str, Any], out: str, seed: int) -> dict[str, Any]:
        """Train one configuration to its end, or until the parent prunes it.

        A plan that declines this configuration is left out; one whose steps turn out not to be the same is
        left at that step. `plan_left` says why.
        """
        job = comparable(self.job(**parameters))
        self._num_epochs, self._plan, self._epoch, self._declined = job.epochs, plan, {}, ""
        self._out = Path(out)
        kept = whole_manifest(self._out / CHECKPOINTS) if plan and can_go_on(self._out) else {}
        if kept and not self._acts(Plan.loads(kept["plan"]).to_dict()):
            broke = Tally.of(kept.get("held")).broken_steps
            self._declined = "" if broke else "it had been left before the trial went on"
        try:
            try:
                run = self._run(job, Plan.from_dict(plan), out, seed)
            except Refused as refused:
                self._declined = str(refused)
                run = self._run(job, Plan(), out, seed)
        except Pruned:
            return {"pruned": True, **self._epoch, **self._cost(job)}
        if run.interrupted:
            raise ChildFailed(f"it was stopped by {run.interrupted_by} in epoch {run.epochs + 1}")
        steps = run.steps - (run.resumed_from_step or 0)
        return {
            "pruned": False,
            "metric": run.metric,
            "loss": run.loss,
            "epoch": run.epochs,
            "step_seconds": run.stepping_seconds / steps if steps else None,
            "plan_left": self._plan_left(run.plan),
            **self._cost(job),
        }

    def _run(self, job: Job, plan: Plan, out: str, seed: int) -> Run:
        return train(
            job,
            None if can_go_on(self._out) else plan,  # where it goes on its own: it may have fallen back
            out=out,
            resume=True,
            seed=seed,
            checkpoint_every_seconds=CHECKPOINT_SECONDS,
            on_event=self._heard,
            on_broken="fallback",
        )

    def _cost(self, job: Job) -> dict[str, Any]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"peak_bytes": peak, "num_parameters": self._num_parameters, "of_epochs": job.epochs}

    def _heard(self, event: Event) -> None:
        if event.kind == EventKind.BEGIN:
            self._num_parameters = event.payload["num_parameters"]
        if event.kind != EventKind.EPOCH:
            return
        found = {key: event.payload.get(key) for key in ("epoch", "metric", "loss", "step")}
        left = self._plan_left(Plan.load(self._out / PLAN).to_dict() if self._plan else {})
        self._epoch = {**found, "plan_left": left, "ended": found["epoch"] == self._num_epochs}
        if ask_parent(self._epoch)["prune"]:
            raise Pruned

    def _plan_left(self, trained: dict[str, Any]) -> str:
        """Why the plan did not act to the end in a run that `trained` under another; that one may add smaller
        pieces of a batch.
        """
        return self._declined or ("" if self._acts(trained) else "a watched step was not the same")

    def _acts(self, trained: dict[str, Any]) -> bool:
        return all(trained.get(name) == settings for name, settings in self._plan.items())


def comparable(job: Job) -> Job:
    """The job itself. Raises JobError where it has no metric."""
    if job.metric is None:
        raise JobError("a sweep needs the Job's metric(model, batches), higher is better, to compare by")
    return job
