"""Copying a session's state out and back."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

from vivace.job import Batch, Job
from vivace.session.session import Session
from vivace.tensors.modules import named_buffers, named_parameters
from vivace.tensors.optimizers import (
    IMPLEMENTATION_FLAGS,
    forget_gradients,
    load_optimizer,
    shared_as_before,
    state_of_optimizer,
)
from vivace.tensors.outside import Attributes, Outside, Owners, assign, attributes, changed
from vivace.tensors.shards import Shards, whole
from vivace.tensors.trees import map_tensors
from vivace.verifying.displacement import State, Tensors


@dataclasses.dataclass(frozen=True)
class InPython:
    """What a job keeps in Python beside weights and buffers, such as counters and generators of random
    numbers: `attributes` of modules and optimizers, and what its functions reach `outside` of these.
    """

    attributes: Attributes
    outside: Outside | None

    @classmethod
    def of(cls, session: Session, job: Job, like: InPython | None = None) -> InPython:
        """As it is now; only as much as `like` holds."""
        models = session.build.models
        found, outside = attributes(owners_of(session)), None
        if like is not None:
            found = {key: value for key, value in found.items() if key in like.attributes}
        if like is None or like.outside is not None:
            with suppress(Exception):  # whatever a person's objects do when they are looked at
                outside = Outside((job.loss, job.on_gradients, job.step), models)
        return cls(found, outside)

    def put_back(self, session: Session) -> None:
        """Let it be so again for the steps of a session."""
        assign(owners_of(session), self.attributes)
        if self.outside is not None:
            self.outside.put_back()


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A point along the reference's run: state, optimizers, next batch, and weight decay by name. `python`:
    what the job keeps there, where steps change that.
    """

    state: State
    optimizers: list[dict[str, Any]]
    position: int
    decay: dict[str, float]
    python: InPython | None = None

    @classmethod
    def of(cls, session: Session, job: Job, position: int) -> Snapshot:
        """Copies of what a session holds now."""
        held = state_of(session), optimizer_states(session), position, decay_of(session)
        return cls(*held, InPython.of(session, job))


def owners_of(session: Session) -> Owners:
    """What keeps attributes."""
    return [*session.build.models, *session.optimizers]


def moving_only(snapshots: list[Snapshot], session: Session) -> list[Snapshot]:
    """The same with what has changed of `python` since the first of them; None where nothing has."""
    kept = [snapshot.python for snapshot in snapshots if snapshot.python is not None]
    now, moving = attributes(owners_of(session)), set[tuple[int, str, str]]()
    for python in kept:
        moving |= set(changed(now, python.attributes))
    outside = any(p.outside is not None and (p.outside.moved() or p.outside.drew()) for p in kept)
    found = []
    for snapshot, python in zip(snapshots, kept, strict=True):
        own = {key: value for key, value in python.attributes.items() if key in moving}
        part = InPython(own, python.outside if outside else None)
        found.append(dataclasses.replace(snapshot, python=part if own or outside else None))
    return found


@contextmanager
def repeatable(wanted: bool) -> Iterator[None]:
    """Inside, torch takes algorithms that give equal bits every time, where it has such; `wanted` or not.

    On GPUs it does not otherwise: gradients of convolutions and embeddings are summed by atomic additions.
    """
    if not wanted:
        yield
        return
    cudnn: Any = torch.backends.cudnn
    algorithms = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    before = cudnn.deterministic, cudnn.benchmark
    torch.use_deterministic_algorithms(True, warn_only=True)
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(algorithms, warn_only=warn_only)
        cudnn.deterministic, cudnn.benchmark = before


def clone(batch: Batch) -> Any:
    """A copy of a batch's tensors: a step that edits its batch in place must not change the next run."""
    return map_tensors(batch, torch.Tensor.clone)


def state_of(session: Session) -> State:
    """Copies of all parameters and buffers, by name, whole on each rank: where ranks hold parts, all of them
    call this together.
    """
    models = session.build.models
    parameters = {name: whole(p).clone() for name, p in named_parameters(models)}
    return State(parameters, {name: b.detach().clone() for name, b in named_buffers(models)})


def optimizer_states(session: Session) -> list[dict[str, Any]]:
    """Copies of the optimizers' states, whole on each rank as `state_of` has it."""
    states = [copy.deepcopy(state_of_optimizer(optimizer)) for optimizer in session.optimizers]
    shards = session.build.shards
    return states if shards is None else [shards.gathered(state, keep=True) for state in states]


def kept_states(session: Session) -> dict[str, Any]:
    """Copies of what the plan's techniques keep, by their names."""
    return {name: copy.deepcopy(stateful.state_dict()) for name, stateful in session.build.kept.items()}


def parameter_names(session: Session) -> dict[int, str]:
    """The names of parameters, by their `id`."""
    return {id(p): name for name, p in named_parameters(session.build.models)}


def strides_of(session: Session) -> list[tuple[int, ...]]:
    """The memory order of weights: where it is another, outputs and their random masks may have it, too."""
    return [p.stride() for model in session.build.models for p in model.parameters()]


def averages_of(session: Session) -> Tensors:
    """Copies of what the optimizers keep of each number of a parameter, such as running averages, whole on
    each rank: ``exp_avg of head.weight``.
    """
    names = parameter_names(session)
    return {
        f"{key} of {names[id(parameter)]}": whole(value).clone()
        for optimizer in session.optimizers
        for parameter, kept in optimizer.state.items()
        for key, value in kept.items()
        if isinstance(value, torch.Tensor)
        and (value.is_floating_point() or value.is_complex())
        and value.shape == parameter.shape
        and id(parameter) in names
    }


def load_state(session: Session, state: State) -> None:
    """Copy parameters and buffers back in place."""
    shards = session.build.shards
    with torch.no_grad():
        for name, parameter in named_parameters(session.build.models):
            value = state.parameters[name]
            parameter.copy_(value if shards is None else shards.parted(value, parameter))
        for name, buffer in named_buffers(session.build.models):
            buffer.copy_(state.buffers[name])


def restore(session: Session, snapshot: Snapshot) -> None:
    """Put a session back to a snapshot; a technique's choice of optimizer implementation stays."""
    if snapshot.python is not None:  # first: it may reach another session's model, and this one is another's
        snapshot.python.put_back(session)
    load_state(session, snapshot.state)
    with shared_as_before(session.optimizers):
        for optimizer, saved in zip(session.optimizers, snapshot.optimizers, strict=True):
            load_optimizer(optimizer, copy.deepcopy(saved), partial(_load_one, session.build.shards))
            forget_gradients(optimizer)


def _load_one(shards: Shards | None, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    groups = state.get("param_groups", optimizer.param_groups)  # a class may keep its state in its own way
    for group, mine in zip(groups, optimizer.param_groups, strict=True):
        group.update({flag: mine[flag] for flag in IMPLEMENTATION_FLAGS if flag in mine})
    optimizer.load_state_dict(state if shards is None else shards.parted_optimizer(state, optimizer))


def decay_of(session: Session) -> dict[str, float]:
    """Learning rate times weight decay of every parameter, by name."""
    names = parameter_names(session)
    groups = [group for optimizer in session.optimizers for group in optimizer.param_groups]
    return {
        names[id(p)]: float(group["lr"]) * float(group.get("weight_decay", 0.0))
        for group in groups
        for p in group["params"]
        if id(p) in names
    }
