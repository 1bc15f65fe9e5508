"""What the job's parameters change: looked up in a child process, before any trial."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from typing import Any

import torch
from optuna.distributions import CategoricalDistribution

from vivace.data.damage import Damage
from vivace.data.order import ordered
from vivace.errors import VivaceError
from vivace.job import Job, JobFunction
from vivace.measuring.worker import LIBRARIES
from vivace.session.opening import call, first_batches, models_of, optimizer_of
from vivace.sweeping.space import Parameters, Space
from vivace.sweeping.stacking.rows import structure_of
from vivace.sweeping.trial import comparable
from vivace.tensors.loaders import known_length
from vivace.tensors.randomness import SeededStreams
from vivace.tensors.trees import outline
from vivace.training.course import sources_of
from vivace.training.resuming import schedule_of

ENTRY = "vivace.sweeping.probe:Probe"
OURS = ("vivace.sweeping.trial", "vivace.sweeping.stacking.child", "vivace.sweeping.side")
OTHERS = (*LIBRARIES, "tensorboard")


class Probe:
    """Looks at the job in a child process: each method is a command of its parent's `Child`."""

    def __init__(self, job: JobFunction, threads: int) -> None:
        torch.set_num_threads(threads)
        self.job = job

    def libraries(self) -> list[str]:
        """Slow imports that every trial would make; later children find them made.

        Those of the job among them are made once it has been looked at.
        """
        train = ("tensorboard.summary.writer.record_writer", "tensorboard.compat.proto.event_pb2")
        return [*train, *(name for name in sys.modules if name.partition(".")[0] in OTHERS)]

    def look(self, parameters: Parameters, closely: bool) -> dict[str, Any]:
        """Epochs, metric and the shape of one configuration, and its kind where that is looked at `closely`.

        Raises JobError where it cannot be built.
        """
        job = comparable(self.job(**parameters))
        model = call(job, "model")
        modules = models_of(job, model)
        return {
            "epochs": job.epochs,
            "metric_name": job.metric_name,
            "metric_data": job.metric_data,
            "shape": shape_of(job, modules),
            "kind": kind_of(job, model) if closely else "",
            "sources": sources_of(job),
            "num_parameters": sum(p.numel() for m in modules for p in m.parameters()),
        }

    def rates(self, parameters: Parameters) -> None:
        """Raises JobError where learning rates cannot be carried over to this configuration."""
        job = self.job(**parameters)
        schedule_of(job, optimizer_of(job, call(job, "model")))


def shape_of(job: Job, modules: Iterable[torch.nn.Module]) -> str:
    """Equal for jobs whose models hold weights of equal names and shapes."""
    found = [
        (name, tuple(tensor.shape), str(tensor.dtype))
        for module in modules
        for name, tensor in module.state_dict(keep_vars=True).items()
        if isinstance(tensor, torch.Tensor)
    ]
    return hashlib.sha256(repr((found, job.step is None)).encode()).hexdigest()[:16]


def kind_of(job: Job, built: object) -> str:
    """Equal for jobs whose runs have what those of one stack have in common (see `structure_of`), and first
    batches that are built alike; empty where that cannot be seen: why, each trial says of itself.
    """
    if job.step is not None:
        return ""
    try:
        structure = structure_of(job, models_of(job, built)[0], optimizer_of(job, built))
        with SeededStreams(0):
            loader = call(job, "data")
        batch = first_batches(ordered(loader, seed=0, epoch=0, damage=Damage.of(job)), 1)
    except VivaceError:
        return ""
    batches = known_length(loader), outline(batch)
    if outline(batch) not in batches:  # it holds what is not looked into
        return ""
    return hashlib.sha256(repr((structure, *batches)).encode()).hexdigest()[:16]


def variations(space: Space, fixed: Parameters) -> dict[str, list[Parameters]]:
    """By parameter: configurations that differ from the first one in that parameter alone.

    The first one, which has the lowest value or first choice of each, stands under the empty name.
    """
    values = {name: values_of(found) for name, found in space.items()}
    first = {**fixed, **{name: found[0] for name, found in values.items()}}
    found = {name: [{**first, name: value} for value in some[1:]] for name, some in values.items()}
    return {"": [first], **found}


def values_of(found: Any) -> list[Any]:
    """The choices of a distribution, or its ends."""
    if isinstance(found, CategoricalDistribution):
        return list(found.choices)
    return [found.low, found.high]
