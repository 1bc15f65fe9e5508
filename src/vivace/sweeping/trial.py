"""A trial in a process of its own: the child's side. It is a run of `vivace train`, asked at each epoch."""

from __future__ import annotations

import resource
from typing import Any

import torch

from vivace.events import Event, EventKind
from vivace.job import JobFunction
from vivace.plan import Plan
from vivace.processes.child import ask_parent
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
        self._epochs: list[dict[str, Any]] = []

    def train(
        self, parameters: dict[str, Any], plan: dict[str, Any], out: str, seed: int
    ) -> dict[str, Any]:
        """Train one configuration to its end, or until the parent prunes it; see `told` for the answer."""
        job = self.job(**parameters)
        self._epochs = []
        try:
            run = train(
                job,
                Plan.from_dict(plan),
                out=out,
                resume=True,
                seed=seed,
                checkpoint_every_seconds=CHECKPOINT_SECONDS,
                on_event=self._heard,
                on_broken="fallback",
            )
        except Pruned:
            return {"pruned": True, **self._last(), **self._cost()}
        step = run.stepping_seconds / run.steps if run.steps and run.resumed_from_step is None else None
        return {
            "pruned": False,
            "metric": run.metric,
            "loss": run.loss,
            "epoch": run.epochs,
            "steps": run.steps,
            "step_seconds": step,
            "plan_kept": run.plan == plan,
            **self._cost(),
        }

    def _heard(self, event: Event) -> None:
        if event.kind != EventKind.EPOCH:
            return
        found = {key: event.payload.get(key) for key in ("epoch", "metric", "loss", "step")}
        self._epochs.append(found)
        if ask_parent(found)["prune"]:
            raise Pruned

    def _last(self) -> dict[str, Any]:
        return self._epochs[-1] if self._epochs else {}

    def _cost(self) -> dict[str, Any]:
        return {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}

