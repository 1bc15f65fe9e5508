"""A trained model as its plan runs it: the forward pass of a training step, which trains nothing here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from vivace.job import Job
from vivace.plan import Plan
from vivace.serving.calls import Flat
from vivace.session.opening import attach, optimizer_of


def under_plan(job: Job, plan: Plan, flat: Flat) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The flat model, in evaluation mode, as a step under the plan calls it: a function of its tensors.

    It changes the model and the process for good. Raises Refused where the plan cannot act here, JobError
    where the Job's optimizer fails.
    """
    model = flat.model
    for parameter in model.parameters():  # techniques ask what is trained
        parameter.requires_grad_(parameter.is_floating_point())
    returned: list[torch.Tensor] = []

    def call(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        returned[:] = flat(*tensors)
        return torch.zeros(())

    if job.step is not None:
        session = attach(plan, step=call, models=[model])
        run = session.seams.step
    else:
        optimizer = optimizer_of(job, model)
        session = attach(plan, model=model, optimizer=optimizer, loss=lambda _, tensors: call(tensors))
        run = session.seams.forward

    def answer(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        run(session.place(list(tensors)))
        return tuple(returned)

    return answer
