"""The rehearsal: many cheap steps in which the ruler dictates the loss, and with it every gradient.

Where no matrix product rounds, a plan that keeps its promise follows the reference almost bit for bit,
whatever precision it computes in. So what happens around the model (which data come, how gradients are added
up, scaled and clipped, the update, the schedule) is compared far more finely than in lockstep, and over many
more steps, for the price of the update.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from vivace.job import Batch, Job
from vivace.session.opening import seed_everything
from vivace.session.session import Session
from vivace.tensors.shards import Shards
from vivace.tensors.trees import batch_size, tensors
from vivace.verifying.displacement import Tensors, largest, scale_and_residual
from vivace.verifying.facts import Facts, difference, settings_of
from vivace.verifying.figures import Measure, Quantity
from vivace.verifying.judgement import LIMIT, check
from vivace.verifying.schedules import Schedule
from vivace.verifying.states import Snapshot, averages_of, clone, parameter_names, restore, state_of
from vivace.verifying.tap import Tap, same_data

EARLY = 3  # steps after which the weights are looked at for the first time: Adam's averages are young there
SCHEDULE_EVERY = 3  # steps to an epoch of the schedule
SMALLEST_SLOPE = 1e-10  # as a share of the typical gradient: as small as an optimizer's epsilon
LARGEST_SLOPE = 10.0


@dataclasses.dataclass
class Rehearsal:
    """What a rehearsal left behind: `settings` of the optimizers' groups after each step, `groups` the number
    of each parameter's; `averages`: how the last step moved what the optimizers keep, and how large that is.
    `fault` names data that never came, or another schedule.
    """

    losses: list[float]
    settings: list[list[Facts]]
    groups: dict[str, int]
    early: Tensors
    end: Tensors
    averages: dict[str, tuple[torch.Tensor, float]] = dataclasses.field(default_factory=dict)
    fault: str = ""


class DictatedLoss:
    """Linear in the parameters, a mean over the samples: ``mean_i s(sample i) * (1 + phase * <p, slopes>)``.

    Its gradient is the slopes times the phase times the mean of `s`, which lies between 0.5 and 1.5 and
    depends on every number of the batch; its value is the mean of `s`. The phase changes from step to step,
    so that an optimizer's memory matters; it is a tensor, which a captured step reads anew.

    Of blocks of which each rank holds a part (`shards`) no forward pass runs, so that nobody averages their
    gradients: the mean of `s` is then that over all ranks.
    """

    def __init__(self, slopes: Tensors, device: torch.device) -> None:
        self.slopes = slopes
        self.shards: Shards | None = None
        self.phase = torch.ones((), device=device)

    def begin(self, step: int) -> None:
        """Set the phase of a step: between -0.3 and 1.7, in no rhythm."""
        self.phase.fill_(0.7 + math.sin(2.4 * step * step))

    def __call__(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The scalar loss of a batch."""
        named = [(p, self.slopes[name]) for name, p in model.named_parameters() if name in self.slopes]
        factor = _of_samples(batch, next(model.parameters()).device).mean()
        total: Any
        if self.shards is None:
            total = sum((p * slope).sum() for p, slope in named)
        else:
            total = sum(self.shards.product(p, slope) for p, slope in named)
            factor = self.shards.mean(factor)
        loss: torch.Tensor = factor * (1.0 + self.phase * (total - total.detach()))
        return loss


def slopes_like(gradients: Tensors, parameters: Tensors) -> Tensors:
    """Gradients of all sizes, for the parameters that have one: from an optimizer's epsilon to large ones."""
    numbers = torch.Generator().manual_seed(3)
    decades = math.log10(LARGEST_SLOPE / SMALLEST_SLOPE)
    slopes = {}
    for name, parameter in parameters.items():
        if name not in gradients or not parameter.is_floating_point():
            continue
        typical = float(gradients[name].double().square().mean().sqrt()) or 1e-3
        exponents = torch.rand(parameter.shape, generator=numbers, dtype=torch.float64) * decades
        signs = torch.randint(2, parameter.shape, generator=numbers) * 2 - 1
        slope = signs * typical * SMALLEST_SLOPE * 10.0**exponents
        slopes[name] = slope.to(parameter.device, parameter.dtype)
    return slopes


def rehearse(
    session: Session,
    tap: Tap,
    job: Job,
    start: Snapshot,
    batches: list[Any],
    dictate: DictatedLoss,
    *,
    steps: int,
    roundoff: float,
    share: Callable[[Any], Any],
) -> Rehearsal:
    """Train `steps` steps from `start` under a dictated loss, the schedule stepped as `train` would.

    `share` is what the session gets of a batch.

    A schedule by the epoch is stepped every few steps; from half-way on each step is taken at half of the
    learning rate, which a plan must follow as it follows a scheduler.
    """
    restore(session, start)
    seed_everything(1)
    schedule = _Epochs(job, session)
    found = Rehearsal([], [], _groups(session), {}, {})
    tap.dictated, tap.asked, dictate.shards = dictate, False, session.build.shards
    session.forget()  # what was captured holds the job's own loss
    try:
        for step in range(steps):
            batch = share(batches[step % len(batches)])
            tap.pieces = []
            dictate.begin(step)
            before = averages_of(session) if step == steps - 1 else {}
            with _halved(session) if step > steps // 2 else nullcontext():
                found.losses.append(float(torch.as_tensor(session.step(clone(batch))).detach()))
            if tap.pieces and not found.fault and not same_data(tap.pieces, batch, roundoff):
                found.fault = f"other data than the loader's reached the loss in step {step}"
            schedule.step(step)
            found.settings.append([settings_of(g) for o in session.optimizers for g in o.param_groups])
            if step == min(EARLY, steps) - 1:
                found.early = state_of(session).parameters
    finally:
        tap.dictated, tap.pieces = None, []
        session.forget()
    for name, after in averages_of(session).items():
        if name in before:
            size = float(torch.maximum(after.double().square(), before[name].double().square()).sum())
            found.averages[name] = after - before[name], size
    if not tap.asked:
        found.fault = "its step never evaluates the job's loss"
    found.end = state_of(session).parameters
    return found


def fault_of(mine: Rehearsal, theirs: Rehearsal) -> str:
    """What is plainly wrong: other data, or another course of the optimizer's settings."""
    if mine.fault:
        return mine.fault
    named = {(number, theirs.groups[name]) for name, number in mine.groups.items() if name in theirs.groups}
    for step, (ours, reference) in enumerate(zip(mine.settings, theirs.settings, strict=True)):
        if not named and len(ours) != len(reference):
            return f"the optimizer has {len(ours)} parameter groups, and {len(reference)} in the job"
        pairs = sorted(named) or [(i, i) for i in range(len(ours))]
        found = filter(None, (difference(ours[a], reference[b], only_shared=True) for a, b in pairs))
        if text := next(found, ""):
            return f"after {step + 1} steps of a schedule the optimizer's {text}"
    return ""


def same_rehearsals(mine: Rehearsal | None, theirs: Rehearsal | None) -> bool:
    """Are losses and weights bit-identical, or were there no rehearsals?"""
    if mine is None or theirs is None:
        return True
    pairs = ((mine.early, theirs.early), (mine.end, theirs.end))
    return mine.losses == theirs.losses and all(
        torch.equal(ours[name], others[name]) for ours, others in pairs for name in others
    )


def checks_of(
    mine: Rehearsal, theirs: Rehearsal, before: Tensors, slopes: Tensors, roundoff: float
) -> list[dict[str, Any]]:
    """The figures: reported losses, the updates of all parameters together and of each, and how the
    optimizers' averages move. What is kept in too few bits stands still, though its size is right.
    """
    found = []
    finest = roundoff / 16

    def figure(measure: Measure, value: float, envelope: float = 0.0) -> None:
        # A single gradient may be rounded by a whole unit, and of a parameter one element may be all.
        limit = 2 * LIMIT if measure.layer else LIMIT
        found.append(check(measure, 0, value, envelope, roundoff, floor=finest, limit=limit))

    losses = zip(mine.losses, theirs.losses, strict=True)
    figure(Measure(Quantity.DICTATED_LOSS), largest(abs(a - b) / (abs(b) or 1.0) for a, b in losses))
    for when in ("early", "end"):
        sums = [0.0, 0.0, 0.0, 0.0]
        for name in slopes:
            start, ours, other = before[name].double(), getattr(mine, when)[name], getattr(theirs, when)[name]
            a, b = (ours.double() - start).flatten(), (other.double() - start).flatten()
            size = torch.finfo(other.dtype).eps ** 2 * float(
                torch.maximum(start.square(), other.double().square()).sum()
            )
            parts = [float(a @ b), float(b @ b), float(a @ a), size]
            sums = [x + y for x, y in zip(sums, parts, strict=True)]
            for quantity, value, envelope in _figures(*parts):
                figure(Measure(quantity, name, when), value, envelope)
        for quantity, value, envelope in _figures(*sums):
            figure(Measure(quantity, moment=when), value, envelope)
    for name, (moved, size) in theirs.averages.items():
        if name in mine.averages:
            due, unit = float(moved.double().norm()), torch.finfo(moved.dtype).eps * math.sqrt(size)
            value = float((mine.averages[name][0] - moved).double().norm()) / (due or 1.0)
            measure = Measure(Quantity.DICTATED_AVERAGES, name)
            found.append(check(measure, 0, value, unit / (due or 1.0), roundoff, floor=roundoff, limit=LIMIT))
    return found


def _figures(dot: float, square: float, whole: float, size: float) -> list[tuple[Quantity, float, float]]:
    """Scale and residual, each with the unit in the last place of the weights beside the way they went."""
    scale, residual = scale_and_residual(dot, square, whole, 0.0)
    unit = math.sqrt(size / square) if square else 0.0
    return [(Quantity.DICTATED_SCALE, scale, unit), (Quantity.DICTATED_RESIDUAL, residual, unit)]


def _of_samples(batch: Batch, device: torch.device) -> torch.Tensor:
    """One number between 0.5 and 1.5 for each sample, from all finite numbers that the batch holds of it; a
    single 1 where it holds none.
    """
    count = batch_size(batch)
    if not count:
        return torch.ones(1, device=device)
    total = torch.zeros(count, dtype=torch.float64, device=device)
    for index, tensor in enumerate(tensors(batch)):
        if tensor.layout == torch.strided and tensor.dim() and tensor.shape[0] == count and tensor.numel():
            numbers = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
            values = numbers.detach().to(device).reshape(count, -1).double().nan_to_num(0.0, 0.0, 0.0)
            waves = torch.cos(torch.arange(values.shape[1], dtype=torch.float64, device=device) + index)
            total = total + (values * waves).mean(1)
    return (1.0 + 0.5 * total / (1.0 + total.abs())).float()


def _groups(session: Session) -> dict[str, int]:
    """The number of each parameter's group, counted over all optimizers."""
    names = parameter_names(session)
    groups = [group for optimizer in session.optimizers for group in optimizer.param_groups]
    return {names[id(p)]: i for i, g in enumerate(groups) for p in g["params"] if id(p) in names}


@contextmanager
def _halved(session: Session) -> Iterator[None]:
    """Inside, learning rates are half of what they are. A scheduler does not see it: of two that are the same
    one computes the next rate from the last one, and another from the step's number.
    """
    groups = [group for optimizer in session.optimizers for group in optimizer.param_groups]
    before = [copy.deepcopy(group["lr"]) for group in groups]
    _set_rates(groups, [rate / 2 for rate in before])
    try:
        yield
    finally:
        _set_rates(groups, before)


def _set_rates(groups: list[dict[str, Any]], rates: list[Any]) -> None:
    for group, rate in zip(groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].copy_(rate)
        else:
            group["lr"] = rate


class _Epochs:
    """The job's schedule in a rehearsal, in which an epoch is a few steps long."""

    def __init__(self, job: Job, session: Session) -> None:
        self.every = SCHEDULE_EVERY if job.scheduler_every == "epoch" else 1
        self.left = job.epochs if job.scheduler_every == "epoch" else None
        self.schedule = Schedule(job, session)

    def step(self, number: int) -> None:
        """After a training step."""
        if (number + 1) % self.every or self.left == 0:
            return
        self.left = self.left - 1 if self.left is not None else None
        self.schedule.step()
