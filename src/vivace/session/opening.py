"""Opening a session: on objects that a person already has (`attach`), or on a Job (`start`)."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader

from vivace import words
from vivace.blame import blame
from vivace.data.damage import Damage
from vivace.data.order import isolated, ordered, require_index
from vivace.errors import (
    Code,
    InputError,
    JobError,
    OutOfMemory,
    Refused,
    VivaceError,
    is_busy_device,
    ran_out_of_memory,
)
from vivace.inspection import inspect
from vivace.inspection.device_choice import of_launch
from vivace.job import Batch, Job
from vivace.machine import Machine
from vivace.plan import Plan
from vivace.session.session import Session
from vivace.technique import Build
from vivace.tensors.modules import named_buffers, named_parameters
from vivace.tensors.precision import set_fp32_precision
from vivace.tensors.randomness import SeededStreams, derive
from vivace.tensors.trees import bytes_of, fields_of, tensors
from vivace.torch_internals.modules import give_step_hooks
from vivace.torch_internals.tensors import storage_ids

LOOKING_SECONDS = 3.0
_LAZY = (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)
ALIKE, ALIKE_SECONDS = 6, 0.5  # after so many batches of one size in that time all are taken to have it
STEPS_AN_OCTAVE = 4  # of the sizes of batches

Part = TypeVar("Part")


def attach(
    plan: Plan | str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    on_gradients: Callable[[Any], Any] | None = None,
    step: Callable[[Any], Any] | None = None,
    models: Sequence[nn.Module] = (),
    machine: Machine | None = None,
) -> Session:
    """Open a session on objects that a person already has; nothing is inherited and nothing is taken away.

    `plan` is a Plan, or the path of a plan file or of its folder. Either `model`, `optimizer` and
    ``loss(model, batch)``, or an own ``step(batch)`` with the `models` that it trains. Raises `Refused` with
    the technique's name and reason where the plan cannot act, PlanError where the file holds no plan, and
    InputError on wrong arguments, or where the models are on the CPU and the machine's GPU cannot be used.
    """
    if not isinstance(plan, Plan):
        plan = Plan.load(plan)
    if step is not None and (model is not None or loss is not None or not models):
        raise InputError(
            "attach takes either model, optimizer and loss, or step(batch) and the models it trains"
        )
    if step is not None and on_gradients is not None:
        raise InputError(
            "attach takes no on_gradients with a step of your own, which clips its gradients itself"
        )
    if step is None and (model is None or optimizer is None or loss is None):
        raise InputError("attach needs model, optimizer and loss(model, batch); or step(batch) and models")
    for technique in plan.techniques:
        if technique.card.shards_weights:
            raise Refused(
                "in a loop of your own you would save, load and evaluate weights of which each rank holds a "
                "part: use vivace.train, or torch's fully_shard itself"
            ).by(technique.name)
    trained = [model] if model is not None else list(models)
    first = next((p for m in trained for p in m.parameters()), None)
    device, machine = first.device if first is not None else torch.device("cpu"), machine or inspect()
    if device.type == "cpu" and machine.device.kind == "cuda" and not torch.cuda.is_available():
        training_device(machine)  # raises, and says why
    build = Build(
        models=trained,
        optimizer=optimizer,
        machine=machine,
        device=device,
        own_step=step is not None,
    )
    optimizers = [optimizer] if optimizer is not None else []
    return Session(plan, build, loss=loss, step=step, on_gradients=on_gradients, optimizers=optimizers)


def start(job: Job, plan: Plan, machine: Machine, *, seed: int = 0, strict: bool = True) -> Session:
    """Build a job from zero and open it under `plan`, on top of strict fp32 (`strict`) or of PyTorch's
    defaults.

    Raises JobError where one of the Job's callables fails, `Refused` where the plan cannot act, and
    InputError where the machine's GPU cannot be used.
    """
    seed_everything(seed)
    device = training_device(machine)
    built = call(job, "model")
    models = models_of(job, built)
    for module in models:
        module.to(device)
        module.train()
    optimizer = optimizer_of(job, built)
    build = Build(
        models=models, optimizer=optimizer, machine=machine, device=device, own_step=job.step is not None
    )
    if strict:
        forbid_tf32(build)
    step = partial(job.step, built, optimizer) if job.step is not None else None
    session = Session(
        plan,
        build,
        loss=job.loss,
        step=step,
        on_gradients=job.on_gradients,
        optimizers=parts_of(optimizer, torch.optim.Optimizer),
    )
    session.belong_to_job(built)
    return session


def reopened(session: Session, job: Job, plan: Plan, between: Callable[[], None]) -> Session:
    """The job of `session` under another plan: the same model and optimizer, as they are now.

    `session` is closed, then `between` is called. Techniques of both plans keep their state. Raises Refused
    where the plan cannot act.
    """
    kept = {name: stateful.state_dict() for name, stateful in session.build.kept.items()}
    session.close()
    before = session.build
    between()
    build = Build(
        models=before.models,
        optimizer=before.optimizer,
        machine=before.machine,
        device=before.device,
        own_step=before.own_step,
    )
    forbid_tf32(build)
    again = Session(
        plan,
        build,
        loss=job.loss,
        step=None,
        on_gradients=job.on_gradients,
        optimizers=session.optimizers,
    )
    again.belong_to_job(session.built)
    for name, state in kept.items():
        if name in build.kept:
            build.kept[name].load_state_dict(state)
    return again


def call(job: Job, field: str, *arguments: object) -> Any:
    """Call one of the Job's functions. Whatever it raises becomes a JobError: with the person's own line, but
    for an error of Vivace's, as of a recipe that finds no data, whose sentence stands as it is.
    """
    try:
        found = getattr(job, field)(*arguments)
    except (Exception, SystemExit) as error:
        if ran_out_of_memory(error):
            raise OutOfMemory(f"there is not enough memory for the Job's {field} ({blame(error)})") from error
        own = isinstance(error, VivaceError)
        raise JobError(str(error) if own else f"the Job's {field} failed: {blame(error)}") from error
    if found is None and field in ("data", "validation"):
        raise JobError(f"the Job's {field} returned None; it must return batches, such as a DataLoader")
    return found


def models_of(job: Job, built: object) -> list[nn.Module]:
    """The modules in what the Job's model() returned. Raises JobError where these are none or too many, or
    lazy ones that have not seen a batch yet.
    """
    models = parts_of(built, nn.Module)
    if not models:
        raise JobError(f"the Job's model() returned a {type(built).__name__}; it must return an nn.Module")
    if job.step is None and len(models) > 1:
        raise JobError(f"the Job's model() returned {len(models)} modules; several modules need an own step=")
    for name, tensor in (*named_parameters(models), *named_buffers(models)):
        if isinstance(tensor, _LAZY):
            raise JobError(
                f"the Job's model() returned a model in which '{name}' has no shape yet, as it is of a lazy "
                "layer: let model() call the model on a batch before it returns it"
            )
    return models


def optimizer_of(job: Job, built: Any) -> Any:
    """What the Job's optimizer(model) returns. Raises JobError where that does not optimize, or trains what
    the model does not hold.
    """
    optimizer = call(job, "optimizer", built) if job.optimizer is not None else None
    if job.step is None and not isinstance(optimizer, torch.optim.Optimizer):
        raise JobError(
            f"the Job's optimizer(model) returned {type(optimizer).__name__}, not a torch.optim.Optimizer"
        )
    optimizers = parts_of(optimizer, torch.optim.Optimizer)
    for one in optimizers:
        give_step_hooks(one)
    groups = [group for one in optimizers for group in one.param_groups]
    given = [weight for group in groups for weight in group["params"]]
    others = _not_kept(built, given)
    if job.step is None and len(others) == len(given):
        raise JobError(
            "the Job's optimizer(model) holds none of the model's parameters, so nothing would be trained: "
            "build it from the model that it is given"
        )
    if others := [weight for weight in others if weight.requires_grad]:
        raise JobError(
            f"the Job's optimizer(model) also trains {words.count(len(others), 'tensor')} that the model "
            f"does not hold, such as one of shape {tuple(others[0].shape)}, which no checkpoint would keep: "
            "let model() return a module that has them"
        )
    return optimizer


def _not_kept(built: object, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """Those that neither are parameters of the model nor lie in the state that a checkpoint keeps of it."""
    own = {id(weight) for model in parts_of(built, nn.Module) for weight in model.parameters()}
    others = [weight for weight in weights if id(weight) not in own]
    kept = storage_ids(tensors(_states(built))) if others else set()
    return [weight for weight in others if not storage_ids([weight]) & kept]


def _states(built: Any) -> list[Any]:
    """The `state_dict` of each part that has one."""
    if hasattr(built, "state_dict"):
        return [built.state_dict()]
    return [state for _, item in items_of(built) for state in _states(item)]


def parts_of(built: object, kind: type[Part]) -> list[Part]:
    """The modules or optimizers in what a Job's function returned: one, or a collection of several."""
    if isinstance(built, kind):
        return [built]
    return [part for _, item in items_of(built) for part in parts_of(item, kind)]


def schedulers_of(scheduler: object) -> list[Any]:
    """What the Job's scheduler(optimizer) returned, as a list: nothing, one or several."""
    several = scheduler if isinstance(scheduler, (list, tuple)) else [scheduler]
    return [one for one in several if one is not None]


def items_of(built: object) -> list[tuple[Any, Any]]:
    """Keys and items of a mapping, list, tuple, dataclass or SimpleNamespace; none of anything else."""
    if isinstance(built, Mapping):
        return list(built.items())
    if isinstance(built, (list, tuple)):
        return list(enumerate(built))
    if isinstance(built, SimpleNamespace):
        return list(vars(built).items())
    names = fields_of(built)
    if names is None:
        return []
    found = {name: getattr(built, name) for name in names}
    return list((found | getattr(built, "__dict__", {})).items())  # one with slots has no __dict__


def training_device(machine: Machine) -> torch.device:
    """The GPU of this rank where `machine` trains on one, else the CPU.

    Raises InputError where the driver shows the GPU, and torch cannot compute on it.
    """
    if machine.device.kind != "cuda":
        return torch.device("cpu")
    device = torch.device("cuda", of_launch("LOCAL_RANK", 0))
    try:
        torch.ones(1, device=device)
    except RuntimeError as error:
        if ran_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"torch cannot use the {machine.device.name} that the driver shows ({reason}): mend that, or set "
            'CUDA_VISIBLE_DEVICES="" to train on the processor',
            code=Code.BUSY if is_busy_device(error) else Code.NONE,
        ) from error
    return device


def seed_everything(seed: int) -> None:
    """Seed the random streams of Python, NumPy and torch."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def forbid_tf32(build: Build) -> None:
    """Strict fp32: neither matrix products nor convolutions may round their inputs to TF32 or bf16."""
    backends: Any = torch.backends
    cudnn, mkldnn = backends.cudnn, backends.mkldnn
    owners = (backends.cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn)
    set_fp32_precision(build, owners, "ieee")


def _loaded(loader: Iterable[Batch]) -> Iterator[Any]:
    """The loader's batches. Raises JobError where it fails."""
    try:
        yield from loader
    except (Exception, SystemExit) as error:
        raise JobError(f"the Job's data failed while loading: {blame(error)}") from error


def readable(loader: Iterable[Batch], job: Job) -> Any:
    """The loader as it is, or in a job that goes on without damaged samples, one that does so too.

    Raises JobError where that cannot be.
    """
    if job.damaged == "raise" and job.checksums is None:
        return loader
    require_index(loader, job)
    found = ordered(loader, seed=0, epoch=0, damage=Damage.of(job))
    return (batch for batch in found if batch is not None)


def first_batches(loader: Iterable[Batch], count: int) -> list[Any]:
    """Up to `count` batches, at least one. Raises JobError where the loader fails or is empty."""
    batches = list(itertools.islice(_loaded(loader), count))
    if not batches:
        raise JobError(
            "the Job's data() gave no batch: the loader is empty (drop_last with too few samples?)"
        )
    return batches


@dataclasses.dataclass(frozen=True)
class Seen:
    """Batches that were looked at: the bytes of each, one of about every size by its bytes, the largest among
    them, and whether these were all batches.
    """

    sizes: list[int]
    by_size: dict[int, Any]
    all: bool

    def nearest(self, num_bytes: float) -> int:
        """The size nearest to `num_bytes` of which there is a batch."""
        return min(self.by_size, key=lambda size: abs(size - num_bytes))


def look_through(loader: Iterable[Batch], seconds: float, alike_seconds: float | None = None) -> Seen:
    """Look at batches for `seconds`; only for `alike_seconds` where all, and at least `ALIKE`, have one size.

    Raises JobError where the loader fails.
    """
    begin, sizes, kept, ended = time.monotonic(), list[int](), dict[int, tuple[int, Any]](), True
    for batch in _loaded(loader):
        size = bytes_of(tensors(batch))
        sizes.append(size)
        step = round(STEPS_AN_OCTAVE * math.log2(size + 1))
        if step not in kept or size > kept[step][0]:
            kept[step] = size, batch
        alike = len(sizes) >= ALIKE and len(kept) == 1 and size == min(sizes) == max(sizes)
        most = seconds if alike_seconds is None or not alike else alike_seconds
        if time.monotonic() - begin > most:
            ended = False
            break
    return Seen(sizes, dict(kept.values()), ended)


def largest_batch(loader: Iterable[Batch], seconds: float) -> list[Any]:
    """The batch with the most bytes, found within `seconds`; nothing where all of `ALIKE_SECONDS` are alike.

    Raises JobError where the loader fails.
    """
    seen = look_through(loader, seconds, ALIKE_SECONDS)
    return [seen.by_size[max(seen.by_size)]] if len(set(seen.sizes)) > 1 else []


def endless_batches(
    session: Session, job: Job, loader: Iterable[Batch], *, world_size: int = 1
) -> Iterator[Any]:
    """Batches of one epoch of the job's `loader` after another, in the order in which `train` feeds them to
    the first rank.

    A generator, which lives for one pass, is made anew. Raises JobError where a pass is empty.
    """
    for epoch in itertools.count():
        drawn, damage = 0, Damage.of(job)
        source = ordered(loader, seed=0, epoch=epoch, damage=damage, world_size=world_size)
        batches = fed(session, source, derive(0, epoch, "feed"))
        for drawn, batch in enumerate(batches, 1):  # noqa: B007
            if batch is not None:
                yield batch
        if not drawn:
            later = " when it was read again" if epoch else ""
            raise JobError(f"the Job's data() gave no batch{later}")
        if isinstance(loader, Iterator):
            loader = call(job, "data")
        elif isinstance(source, DataLoader):
            loader = source


def fed(session: Session, loader: Iterable[Any], seed: int) -> Iterator[Any]:
    """One pass over what `ordered` gave, as the plan feeds it, leaving the training's random streams alone.

    Such a loader draws nothing from them itself; what techniques put around it draws from streams that begin
    at `seed`. Nothing is read, and no worker started, before the first batch is asked for.
    """
    with SeededStreams(seed):
        batches = session.seams.batches(loader)
    yield from loader if batches is loader else isolated(lambda: batches, seed)


def require_one_number(loss: object) -> torch.Tensor:
    """A step's loss as a tensor. Raises JobError where it is no single number."""
    if loss is None:
        raise JobError("the Job's step returned None; it must return its loss")
    try:
        value = torch.as_tensor(loss)
    except (TypeError, ValueError, RuntimeError):
        kind = type(loss).__name__
        raise JobError(f"the Job's step returned a {kind}; it must return its loss, one number") from None
    if value.numel() != 1:
        shape = tuple(value.shape)
        raise JobError(
            f"the Job's loss has the shape {shape}; it must be one number, the mean over the batch"
        )
    return value


def checked_step(session: Session, batch: Batch) -> float:
    """One step of the job as it is, whose loss must be one finite number. Raises JobError otherwise."""
    try:
        loss = session.step(batch)
    except VivaceError:
        raise
    except (Exception, SystemExit) as error:
        if ran_out_of_memory(error):
            raise
        raise JobError(f"the Job's first step failed: {blame(error)}") from error
    value = require_one_number(loss)
    if not math.isfinite(float(value)):
        raise JobError(
            f"the Job's loss is {float(value)} at step 0, before any technique: mend the job first"
        )
    return float(value)
