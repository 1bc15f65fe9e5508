"""Knowledge distillation: a job whose model also learns to answer as a trained one does.

The added loss is the mean squared error between the outputs of both, which served at least as well as the
divergence of softened probabilities (Kim et al. 2021, https://arxiv.org/abs/2105.08919). It is divided by the
variance of the teacher's outputs: then it needs no temperature, and outputs of any kind have one scale.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from vivace.errors import JobError
from vivace.job import Job, load
from vivace.serving.calls import Call
from vivace.serving.trained import load_trained
from vivace.session.opening import first_batches, readable
from vivace.tensors.randomness import Streams, derive
from vivace.tensors.trees import map_tensors
from vivace.training.course import Fact, sources_of

Loss = Callable[[Any, Any], Any]


def distilled(job: Job | str, *, teacher: Job | str, run: str | os.PathLike[str], weight: float = 1.0) -> Job:
    """The job with a loss that also asks its model to answer as the model of a finished run does.

    To each value of the job's loss comes `weight` times the mean squared error between the model's outputs
    and the teacher's on the same inputs, divided by the variance of the teacher's outputs on the first batch
    (dimensionless; the mean over several outputs). Outputs without dimensions, such as a loss, do not count.
    The teacher is in evaluation mode and learns nothing. Its forward pass is paid in every step of training.

    Args:
        job: a Job, or its reference, of the model that learns; its loss must call the model as a whole.
        teacher: the Job of the run, or its reference; its outputs must have the shapes of the model's.
        run: the folder of a `vivace.train` of the teacher's job, which must stay as it is.
        weight: of what is added, against the job's own loss.
    """
    student = load(job) if isinstance(job, str) else job
    if student.loss is None:
        raise JobError("a Job with its own step computes its loss there: distilled needs loss=(model, batch)")
    if not (weight > 0 and math.isfinite(weight)):
        raise JobError(f"weight is {weight!r}; it must be above 0")
    known = _Teacher(teacher, Path(run), weight)
    return dataclasses.replace(
        student, model=partial(_built, student, known), loss=partial(_taught, student.loss, known)
    )


def _built(job: Job, teacher: _Teacher) -> Any:
    """The job's model, once its teacher is read."""
    teacher.open(job)
    return job.model()


def _taught(own: Loss, teacher: _Teacher, model: Any, batch: Any) -> torch.Tensor:
    """The job's own loss and what is added to it."""
    heard = _Heard(model)
    value: torch.Tensor = own(heard, batch)
    if not heard.calls:
        return value
    return value + teacher.weight * torch.stack([teacher.distance(one) for one in heard.calls]).mean()


class _Teacher(Fact):
    """The trained model, read where the job's model is built, and the variances of its outputs."""

    def __init__(self, job: Job | str, run: Path, weight: float) -> None:
        self.job, self.run, self.weight = job, run, weight
        self.model: nn.Module | None = None
        self.variances: list[float] = []
        self.known: dict[str, str] = {}

    def course(self) -> dict[str, str]:
        """Its weights, its files, and how much it counts."""
        return {**self.known, "weight of the teacher": repr(self.weight)}

    def open(self, student: Job) -> None:
        """Read it. Its variances are of the first training batch, not of each: so pieces of a batch have the
        loss of the whole.
        """
        assert student.loss is not None
        with Streams(derive(0, "teacher")), torch.no_grad():  # what this draws is not missing in the training
            job = load(self.job) if isinstance(self.job, str) else self.job
            self.model, facts = load_trained(job, self.run)
            self.known = {"teacher": f"weights {facts.sha256[:12]}", **sources_of(job, "the teacher's ")}
            heard = _Heard(self.model)
            student.loss(heard, first_batches(readable(student.data(), student), 1)[0])
        if not heard.calls:
            raise JobError(
                "the Job's loss never calls the model that it is given (it may call one of its parts or "
                "methods instead): without its outputs there is nothing to distil"
            )
        outputs = _imitable(heard.calls[0])
        if not outputs:
            raise JobError("the teacher's outputs hold no floating-point tensor: there is nothing to distil")
        self.variances = [float(tensor.var(correction=0)) or 1.0 for tensor in outputs]

    def distance(self, one: Call) -> torch.Tensor:
        """The mean over all outputs of a call of what they leave of the teacher's variance."""
        if self.model is None:
            raise JobError(
                "a distilled Job's loss needs its teacher, which the Job's model() reads: call it first"
            )
        with torch.no_grad():
            its = Call(one.given, _answer(self.model, one))
        mine, theirs = ([tuple(tensor.shape) for tensor in _imitable(each)] for each in (one, its))
        if mine != theirs:
            raise JobError(
                f"the model's outputs have shapes {mine}, and its teacher's {theirs}: they must be equal"
            )
        terms = [
            functional.mse_loss(a.to(torch.float32), b.to(torch.float32)) / variance
            for a, b, variance in zip(_imitable(one), _imitable(its), self.variances, strict=False)
        ]
        return torch.stack(terms).mean()


class _Heard:
    """A model that keeps what it is called with and returns; all else is the model's own."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.calls = list[Call]()

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        returned = self._model(*arguments, **keywords)
        self.calls.append(Call((arguments, keywords), returned))
        return returned

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _imitable(one: Call) -> list[torch.Tensor]:
    """The outputs that are numbers of samples."""
    return [tensor for tensor in one.outputs if tensor.is_floating_point() and tensor.dim()]


def _answer(teacher: nn.Module, one: Call) -> Any:
    """What the teacher returns for a call of another model, on its device and in its own number format."""
    parameter = next(teacher.parameters(), None)
    if parameter is not None and one.outputs and parameter.device != one.outputs[0].device:
        teacher.to(one.outputs[0].device)

    def fitting(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(parameter.dtype) if parameter is not None and tensor.is_floating_point() else tensor

    arguments, keywords = map_tensors(one.given, fitting)
    return teacher(*arguments, **keywords)
