"""What a run must have in common with its checkpoint, and the states that go into one and come out again."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch.utils.data import DataLoader, IterableDataset

from vivace.data.iterable import keeps_state
from vivace.errors import CheckpointError, InputError, JobError, PlanError
from vivace.job import Batch, Job
from vivace.plan import Plan
from vivace.session.opening import call, items_of, parts_of, schedulers_of
from vivace.session.session import Session
from vivace.tensors.loaders import known_length
from vivace.tensors.optimizers import load_optimizer, shared_as_before, state_of_optimizer
from vivace.tensors.randomness import from_plain, restore
from vivace.training.beside import Beside
from vivace.training.checkpoints import unstorable
from vivace.training.course import differences, other_python
from vivace.training.ranks import Ranks, for_so_many
from vivace.training.unapplied import Unapplied

if TYPE_CHECKING:
    from vivace.tensors.shards import Shards

_BIT_EXACT_FACTS = ("torch", "device", "world_size", "threads")


def facts_of(session: Session, loader: Iterable[Batch], seed: int, world_size: int) -> dict[str, Any]:
    """The facts on which the course of a run depends, as JSON types for the manifest."""
    return {
        "torch": torch.__version__,
        "device": _device_name(session.build.device),
        "world_size": world_size,
        "threads": torch.get_num_threads(),
        "seed": seed,
        "plan_id": session.plan.id,
        "plan": session.plan.dumps(),
        "job": _signature(session, loader),
        "course": _stream_of(loader),
        "held": {},  # see `Watch.holds`
    }


def _stream_of(loader: Iterable[Batch]) -> dict[str, str]:
    """How a stream is cut into batches, by which a place in it is told; of data with an index the signature
    says that.
    """
    stream = isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)
    return {"batch_size": str(loader.batch_size)} if stream else {}  # type: ignore[attr-defined]


def _device_name(device: torch.device) -> str:
    """The device as far as bits depend on it: two kinds of GPU add up in different orders."""
    return f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type


def compare(then: dict[str, Any], now: dict[str, Any], folder: Path, *, changed_ok: bool) -> str:
    """An empty string where the run goes on bit for bit, or a sentence on why it cannot.

    Raises PlanError, JobError or InputError with the exact difference where it would be another training;
    with `changed_ok` a changed source or hyper-parameter only stands in the sentence.
    """
    if then["plan_id"] != now["plan_id"] and not _differ_in_ranks(then, now):
        difference = ", ".join(Plan.loads(then["plan"]).diff(Plan.loads(now["plan"])))
        raise PlanError(
            f"the run in '{folder}' trains under another plan (changed: {difference}): resume with its own "
            f"'{folder / 'plan.toml'}', or choose a new name"
        )
    if then["job"] != now["job"]:
        raise JobError(
            f"the run in '{folder}' trains another job (changed: {_difference(then['job'], now['job'])}): "
            "resume with the job it was started with, or choose a new name"
        )
    if then["seed"] != now["seed"]:
        raise InputError(
            f"the run in '{folder}' has seed {then['seed']}, not {now['seed']}: resume with its own"
        )
    course = differences(then["course"], now["course"])
    if course and not changed_ok:
        raise JobError(
            f"the job of the run in '{folder}' has changed ({'; '.join(course[:6])}): resume with the job it "
            "was started with, choose a new name, or accept the change with --changed ok (changed='ok')"
        )
    changed = [*filter(None, (other_python(then["course"], now["course"]),)), *course[:6]]
    if then["plan_id"] != now["plan_id"]:
        changed += Plan.loads(then["plan"]).diff(Plan.loads(now["plan"]))
    changed += [f"{key} {then[key]} -> {now[key]}" for key in _BIT_EXACT_FACTS if then[key] != now[key]]
    return f"resumed, not bit-exact: {', '.join(changed)}" if changed else ""


def measure_alike(then: dict[str, Any], now: dict[str, Any]) -> bool:
    """Is the metric that a checkpoint holds the one that the job measures now, on the same data?"""
    same_words = then.get("metric_of", now["metric_of"]) == now["metric_of"]
    return same_words and not differences(then["course"], now["course"])


def _differ_in_ranks(then: dict[str, Any], now: dict[str, Any]) -> bool:
    """Is the plan the same but for what the number of processes decides, and for how they train one model?"""
    one, other = Plan.loads(then["plan"]), Plan.loads(now["plan"])
    if then["world_size"] == now["world_size"]:
        plans = (Plan(t for t in plan.techniques if not t.card.averages_ranks) for plan in (one, other))
    else:
        plans = (for_so_many(plan, 1) for plan in (one, other))
    return len({plan.id for plan in plans}) == 1


def schedule_of(job: Job, optimizer: object) -> Any:
    """What the Job's scheduler(optimizer) returns; None without one.

    Raises JobError where a checkpoint could not keep its state, or the optimizer's, or where it waits for
    the wrong direction.
    """
    if job.step is not None and (kind := _holds_unkept(optimizer)):
        raise JobError(
            f"the Job's optimizer(model) returned a {kind}, which has no state_dict: a run that was stopped "
            "would go on with new optimizers; return them in a dict, list or dataclass"
        )
    schedule = call(job, "scheduler", optimizer) if job.scheduler is not None else None
    for one in schedulers_of(schedule):
        if not keeps_state(one):
            raise JobError(
                f"the Job's scheduler(optimizer) returned a {type(one).__name__}, which has no state_dict: a "
                "run that was stopped would begin its schedule again; give it state_dict and load_state_dict"
            )
        if isinstance(one, torch.optim.lr_scheduler.ReduceLROnPlateau):
            _require_direction(one.mode, job)
    return schedule


def _holds_unkept(thing: object) -> str:
    """The class of what holds optimizers and tells no state; empty where nothing does."""
    if hasattr(thing, "state_dict"):
        return ""
    if items := items_of(thing):
        return next(filter(None, (_holds_unkept(item) for _, item in items)), "")
    held = getattr(thing, "__dict__", {}).values()
    return type(thing).__name__ if any(isinstance(one, torch.optim.Optimizer) for one in held) else ""


def _require_direction(mode: str, job: Job) -> None:
    if job.metric is not None and mode != "max":
        raise JobError(
            "ReduceLROnPlateau waits for a metric that falls, and a Job's is better the higher it is: give "
            "it mode='max', and let metric return minus an error"
        )
    if job.metric is None and mode != "min":
        raise JobError(
            "ReduceLROnPlateau waits for a loss that rises: without a metric it sees the loss, so leave out "
            "mode='max'"
        )


def require_storable(model: object, optimizer: object, schedule: object) -> None:
    """Raises JobError where a checkpoint could not hold the states of these: asked before and after the first
    step, and not at the first save.
    """
    for what, thing in (("model", model), ("optimizer", optimizer), ("scheduler", schedule)):
        if reason := unstorable(state_of(thing)):
            raise JobError(
                f"the Job's {what} has a state that no checkpoint can hold ({reason}): its state_dict must "
                "consist of numbers, texts and tensors"
            )


def state_of(thing: object) -> Any:
    """The `state_dict` of a thing, of an optimizer with those of others in it, or those of its items (see
    `items_of`) by key or index; else None.
    """
    if isinstance(thing, torch.optim.Optimizer):
        return _with_plain_numbers(state_of_optimizer(thing))
    if hasattr(thing, "state_dict"):
        return _with_plain_numbers(thing.state_dict())
    return {str(key): state_of(item) for key, item in items_of(thing)} or None


def _with_plain_numbers(state: object) -> Any:
    """A state with Python's numbers for NumPy's, such as a schedule leaves that computes with `numpy.cos`: no
    file that runs no code can hold those.
    """
    if isinstance(state, numpy.generic):
        return state.item()
    if type(state) is dict:
        return {key: _with_plain_numbers(part) for key, part in state.items()}
    if isinstance(state, (list, tuple)) and type(state) in (list, tuple):
        return type(state)(map(_with_plain_numbers, state))
    return state


def whole_state_of(thing: object, shards: Shards | None, ranks: Ranks) -> Any:
    """The same where ranks may hold parts of the weights: whole on rank 0. All ranks call it together."""
    state = state_of(thing)
    return state if shards is None else shards.gathered(state, keep=ranks.writes)


def load_into(thing: object, state: Any, what: str, shards: Shards | None = None) -> list[str]:
    """The inverse of `state_of`, and with `shards` of `whole_state_of`; returns what `load_optimizer` does.

    Raises CheckpointError where `what` does not take the state.
    """
    try:
        if isinstance(thing, torch.optim.Optimizer):
            with shared_as_before([thing]):
                return load_optimizer(thing, state, partial(_load_one, shards))
        if hasattr(thing, "load_state_dict"):
            thing.load_state_dict(state if shards is None else shards.parted(state, state_of(thing)))
            return []
        with shared_as_before(parts_of(thing, torch.optim.Optimizer)):
            found = [load_into(item, state[str(key)], what, shards) for key, item in items_of(thing)]
        return [name for names in found for name in names]
    except CheckpointError:
        raise
    except Exception as error:
        head, *rest = str(error).strip().splitlines() or [""]
        if head.endswith(":") and rest:  # torch's list of keys, which begins on a line of its own
            head = f"{head} {textwrap.shorten(rest[0], 160, placeholder=' ...')}"
        raise CheckpointError(
            f"the checkpoint does not fit {what}: {type(error).__name__}: {head}"
        ) from error


def _load_one(shards: Shards | None, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    given = state if shards is None else shards.parted_optimizer(state, optimizer)
    casts = optimizer.register_load_state_dict_post_hook(partial(_keep_types, given), prepend=True)
    try:
        optimizer.load_state_dict(given)
    finally:
        casts.remove()


def _keep_types(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Put back what torch has cast to its weight's type while it loaded a state, such as a momentum in fp32
    of weights in bf16; an optimizer that loads in a way of its own knows better.
    """
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return
    numbers = (number for group in state["param_groups"] for number in group["params"])
    weights = (weight for group in optimizer.param_groups for weight in group["params"])
    for number, weight in zip(numbers, weights, strict=True):
        own = optimizer.state.get(weight, {})
        for key, value in state["state"].get(number, {}).items():
            if isinstance(value, torch.Tensor) and key != "step" and own[key].dtype != value.dtype:
                own[key] = value.to(own[key].device)


def load_beside(beside: Beside, state: list[tuple[int, str, str, Any]]) -> None:
    """Raises CheckpointError where the model does not take what a checkpoint holds beside its weights."""
    try:
        beside.load(state)
    except Exception as error:
        raise CheckpointError(f"the checkpoint does not fit the model: {error!r}") from error


def load_gradients(unapplied: Unapplied, state: list[list[torch.Tensor | None]]) -> None:
    """Raises CheckpointError where the optimizers do not take the gradients that a checkpoint holds."""
    try:
        unapplied.load(state)
    except Exception as error:
        raise CheckpointError(f"the checkpoint does not fit the optimizer: {error!r}") from error


def load_streams(state: dict[str, Any], device: torch.device) -> None:
    """Put back random streams. Raises CheckpointError where the state is of another form."""
    try:
        restore(from_plain(state), device)
    except Exception as error:
        raise CheckpointError(f"the checkpoint's random streams cannot be read: {error!r}") from error


def _signature(session: Session, loader: Iterable[Batch]) -> list[str]:
    """The shapes of a job: every entry of its models, its optimizer's class, and the size of its data."""
    lines = [
        f"model {index} {name}: {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        for index, model in enumerate(session.build.models)
        for name, tensor in model.state_dict().items()
        if isinstance(tensor, torch.Tensor)
    ]
    lines.append(f"optimizer: {type(session.optimizer).__name__}")
    samples = known_length(loader.dataset) if isinstance(loader, DataLoader) else None
    if isinstance(loader, DataLoader) and samples is not None:
        size = getattr(loader.batch_sampler, "batch_size", loader.batch_size)
        return [*lines, f"data: {samples} samples in batches of {size}"]
    return [*lines, f"data: {type(loader).__name__}"]


def _difference(then: list[str], now: list[str]) -> str:
    """The first three entries that differ, as ``name: before -> after``."""
    before, after = (dict(line.split(": ", 1) for line in lines) for lines in (then, now))
    changed = [
        f"{key}: {before.get(key, 'absent')} -> {after.get(key, 'absent')}"
        for key in {**before, **after}
        if before.get(key) != after.get(key)
    ]
    return "; ".join(changed[:3]) + (f"; and {len(changed) - 3} more" if len(changed) > 3 else "")
