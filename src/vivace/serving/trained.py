"""A training run whose weights are to be served: which run, which weights, and the job's model with them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from torch import nn

from vivace.errors import CheckpointError, InputError, JobError
from vivace.events import metric_title
from vivace.job import Job
from vivace.plan import Plan
from vivace.session.opening import call, models_of
from vivace.tensors.randomness import Streams
from vivace.training.beside import make_room
from vivace.training.checkpoints import FILES, Checkpoints
from vivace.training.resuming import load_into
from vivace.words import number

SAME = 0.01  # of the run's metric: what its last evaluation and this one may differ by


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a run folder says of itself: the step of its newest checkpoint, the sha256 of its weights.

    `metric` is the run's own of these weights, None without one; `metric_data` says whether it is of
    ``validation`` or ``training`` data. `seed` is the run's, from which its model and data were built.
    """

    folder: str
    job: str
    step: int
    metric: float | None
    metric_name: str
    sha256: str
    plan: dict[str, Any]
    metric_data: str | None = None
    seed: int = 0

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return dataclasses.asdict(self)


def run_of(folder: Path) -> dict[str, Any]:
    """What ``run.json`` of a run folder says. Raises InputError where no run has ended there."""
    try:
        document = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except OSError:
        raise InputError(
            f"'{folder}' holds no training that has ended: name the --out of a vivace train, or let it end "
            "with --resume"
        ) from None
    except (ValueError, RecursionError):
        raise InputError(f"'{folder / 'run.json'}' is damaged: it is no JSON") from None
    if not isinstance(document, dict) or "steps" not in document:
        raise InputError(f"'{folder / 'run.json'}' is not of a training run")
    return document


def moved_since(facts: dict[str, Any]) -> str:
    """What of the metric is another than when the run ended, in a sentence; empty where it is the same, or
    cannot be compared. `facts` are what `vivace.serving.judge.Judge.record` found.
    """
    before, now = facts["trained"]["metric"], facts["metric"]
    if before is None or not is_of_the_same(facts) or abs(now - before) <= SAME * abs(before):
        return ""
    return (
        f"{metric_title(facts)} was {number(before)} when the run ended, and is {number(now)} with its "
        "weights now: the model's code, what it keeps beside its weights, or the data may have changed"
    )


def damaged_of(facts: dict[str, Any]) -> str:
    """Which samples of the metric could not be read, in a sentence; empty where all were."""
    damaged: str = facts.get("damaged", "")
    return damaged and f"in the {facts['metric_data']} data {damaged}"


def is_of_the_same(facts: dict[str, Any]) -> bool:
    """Is the metric that was found of the same data as that of the run?"""
    return bool(facts["whole"]) and facts["trained"]["metric_data"] == facts["metric_data"]


def plan_of(folder: Path) -> Plan:
    """The plan that a run was trained under. Raises InputError where no run has ended there."""
    return Plan.from_dict(dict(run_of(folder).get("plan") or {}))


def load_trained(job: Job, folder: Path) -> tuple[nn.Module, Trained]:
    """The job's model in evaluation mode with the weights of a run, on the processor, and what they are.

    The newest checkpoint is read, as numbers, texts and tensors only: no code of a stranger runs. Raises
    CheckpointError where its hashes do not hold or the weights do not fit the job's model, JobError where the
    job has several models, InputError where no run has ended in the folder.
    """
    document = run_of(folder)
    checkpoints = folder / "checkpoints"
    found = Checkpoints(checkpoints, {}).newest() if checkpoints.is_dir() else None
    if found is None:
        raise CheckpointError(f"'{folder}' holds no checkpoint: train again, and keep its folder checkpoints")
    if found.skipped:
        raise CheckpointError(
            f"the newest checkpoint of '{folder}' cannot be trusted ({'; '.join(found.skipped)}): put back "
            "an intact copy, or remove it, and the weights before it are taken"
        )
    seed = int(found.manifest.get("seed") or 0)
    built = _built(job, seed)
    make_room([built], found.state.get("beside", []))
    load_into(built, found.model, f"the model of the Job (is '{folder}' a run of another job?)")
    facts = Trained(
        folder=str(folder),
        job=str(document.get("job") or ""),
        step=found.position.step,
        metric=document.get("metric") if found.position.step == document["steps"] else None,
        metric_name=str(document.get("metric_name") or job.metric_name),
        sha256=found.manifest["files"][FILES[0]]["sha256"],
        plan=dict(document.get("plan") or {}),
        metric_data=document.get("metric_data") or job.metric_data,
        seed=seed,
    )
    return built, facts


def untrained(job: Job) -> nn.Module:
    """The job's model in evaluation mode with the weights that it begins with. Raises JobError."""
    return _built(job, 0)


def _built(job: Job, seed: int) -> nn.Module:
    with Streams(seed):  # as its training did: what a model draws and does not save is then the same
        built = call(job, "model")
    models = models_of(job, built)
    if len(models) > 1 or not isinstance(built, nn.Module):
        raise JobError(
            f"the Job's model() returned {len(models)} modules: one module can be compressed or exported"
        )
    return built.cpu().eval()
