"""Optimizers: other settings for a while, a part of the parameters, the order of their state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from vivace.torch_internals.modules import has_step_hooks

IMPLEMENTATION_FLAGS = ("fused", "foreach", "capturable", "differentiable")
"""Of a parameter group: how torch computes an update, and not which one."""
INNER = "inner"  # beside what torch has in a state: the states of optimizers inside of one
_SHARED = ("state", "param_groups")  # what an optimizer may have in common with one inside of it


def switch_optimizer(optimizer: torch.optim.Optimizer, settings: Mapping[str, Any]) -> Callable[[], None]:
    """Set `settings` in every parameter group, again after a checkpoint is loaded; returns what undoes it.

    A saved `state_dict` keeps the person's own values. Step counters live on the device while they have to.
    """
    before = [{key: group[key] for key in settings if key in group} for group in optimizer.param_groups]

    def move_steps() -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                if isinstance(state.get("step"), torch.Tensor):
                    state["step"] = state["step"].to(parameter.device if _counts_on_device(group) else "cpu")

    def switch(_: object = None) -> None:
        for group in optimizer.param_groups:
            group.update({key: value for key, value in settings.items() if key in group})
        move_steps()

    def hide(_: object, state: dict[str, Any]) -> None:
        for group, own in zip(state["param_groups"], before, strict=False):  # others were added since
            group.update(own)
        for group in state["param_groups"]:
            for number in group["params"]:
                kept = state["state"].get(number, {})
                if isinstance(kept.get("step"), torch.Tensor) and not _counts_on_device(group):
                    state["state"][number] = {**kept, "step": kept["step"].cpu()}

    def undo() -> None:
        for hook in hooks:
            hook.remove()
        for group, own in zip(optimizer.param_groups, before, strict=False):
            group.update(own)
        move_steps()

    switch()
    hooks = [
        optimizer.register_load_state_dict_post_hook(switch),
        optimizer.register_state_dict_post_hook(hide),
    ]
    return undo


def _counts_on_device(group: Mapping[str, Any]) -> bool:
    return bool(group.get("fused") or group.get("capturable"))


def coupled(optimizer: torch.optim.Optimizer) -> str:
    """Why the parameters of an optimizer cannot be updated one by one; empty where they can."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim") or isinstance(optimizer, torch.optim.LBFGS):
        return f"{kind.__name__} may look at all parameters at once"
    if has_step_hooks(optimizer):
        return f"{kind.__name__} has hooks that wait for a whole step"
    return ""


def forget_gradients(optimizer: torch.optim.Optimizer) -> None:
    """As the loop of a person's own does it, whose optimizer may do more there than torch's, or take no
    ``set_to_none``; afterwards no weight has a gradient.
    """
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        for weight in group["params"]:
            weight.grad = None


@contextlib.contextmanager
def restricted(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let the optimizer's step see these parameters alone."""
    groups, chosen = optimizer.param_groups, {id(parameter) for parameter in parameters}
    fewer = [{**group, "params": [p for p in group["params"] if id(p) in chosen]} for group in groups]
    optimizer.param_groups = [group for group in fewer if group["params"]]
    try:
        yield
    finally:
        optimizer.param_groups = groups


def inner_optimizers(outer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    """Those that an optimizer holds in attributes, as sharpness-aware ones do, or in containers there, and
    those that these hold, by their paths: ``base_optimizer``.
    """
    found, known = [("", outer)], {id(outer)}
    for path, one in found:
        for name, value in vars(one).items():
            if name in _SHARED:
                continue
            listed = dict(enumerate(value)) if isinstance(value, (list, tuple)) else {}
            for key, part in ({"": value} | (value if isinstance(value, dict) else listed)).items():
                if isinstance(part, torch.optim.Optimizer) and id(part) not in known:
                    known.add(id(part))
                    found.append((".".join(filter(None, (path, name, str(key)))), part))
    return dict(found[1:])


def left_out(outer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    """The optimizers inside of one whose `state_dict` is torch's, which leaves them out."""
    return inner_optimizers(outer) if type(outer).state_dict is torch.optim.Optimizer.state_dict else {}


def unhanded(optimizers: Sequence[torch.optim.Optimizer]) -> set[str]:
    """The paths of those inside whose own state neither the `state_dict` of the one around them holds nor
    another of `optimizers`.
    """
    known = set(map(id, optimizers))
    return {
        name
        for outer in optimizers
        for name, one in left_out(outer).items()
        if one.state and one.state is not outer.state and id(one) not in known
    }


def state_of_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its `state_dict`, and under `INNER` of those inside that this leaves out."""
    state, inner = optimizer.state_dict(), left_out(optimizer)
    return {**state, INNER: {name: one.state_dict() for name, one in inner.items()}} if inner else state


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    load: Callable[[torch.optim.Optimizer, dict[str, Any]], None],
) -> list[str]:
    """The inverse of `state_of_optimizer`, inside of `shared_as_before`; `load` gives one its `state_dict`.
    Returns the paths of those inside that begin anew, as they had other names when others were written down.

    Memory orders become those of the weights.
    """
    pairs, inner = [(optimizer, state)], left_out(optimizer)
    if inner:
        kept, own = state.get(INNER, {}), {key: value for key, value in state.items() if key != INNER}
        pairs = [(optimizer, own), *((one, kept[name]) for name, one in inner.items() if name in kept)]
    for one, own in pairs:
        load(one, own)
    align_state(one for one, _ in pairs)  # weights may lie otherwise than where it was saved
    return sorted(inner.keys() - state[INNER].keys()) if INNER in state else []


@contextlib.contextmanager
def shared_as_before(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """Inside, states may be loaded: after it, the groups and the state of those that hold others, and of
    those in them, are the objects that they were, with what was loaded, as several may share them.
    """
    held_by = [(*inner.values(), outer) for outer in optimizers if (inner := inner_optimizers(outer))]
    spaces = [vars(one) for several in held_by for one in several]
    before = [(space, {key: space[key] for key in _SHARED if key in space}) for space in spaces]
    groups = [list(held.get("param_groups", ())) for _, held in before]
    yield
    for (space, held), own in zip(before, groups, strict=True):
        if "state" in held and space["state"] is not held["state"]:
            _fill(held["state"], space["state"])
        if isinstance(held.get("param_groups"), list):
            now = list(space["param_groups"])
            for group, new in zip(own, now, strict=False):
                _fill(group, new)
            held["param_groups"][:] = [*own[: len(now)], *now[len(own) :]]
        space.update(held)


def _fill(container: dict[Any, Any], values: Mapping[Any, Any]) -> None:
    values = dict(values)
    container.clear()
    container.update(values)


def align_state(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Give every optimizer state of a parameter's shape the parameter's memory order.

    Fused optimizers walk through memory and not through indices: another order silently mixes up elements.
    """
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                like = isinstance(value, torch.Tensor) and value.shape == parameter.shape
                if like and _order(value) != _order(parameter):
                    state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


@contextlib.contextmanager
def aligned(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """Inside, the state of every optimizer, also of one that nobody has named, is aligned before its first
    step, and before the next one after a state was loaded; on leaving once more. So are the gradients of
    each fused step while it runs: who sets them may have cut them from one vector, or transposed them.
    """
    seen = dict.fromkeys(optimizers, object())  # with the state that was aligned

    def align(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if seen.get(optimizer) is not optimizer.state:
            seen[optimizer] = optimizer.state
            align_state([optimizer])
        for group in optimizer.param_groups:
            for weight in group["params"] if group.get("fused") else ():
                gradient = weight.grad
                if gradient is None or gradient.layout != torch.strided:
                    continue
                if gradient.stride() != weight.stride() and _order(gradient) != _order(weight):
                    _give_back_after(optimizer, weight, gradient)
                    weight.grad = torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)

    hook = register_optimizer_step_pre_hook(align)
    try:
        yield
    finally:
        hook.remove()
        align_state(seen)


_own_gradients: dict[torch.optim.Optimizer, list[tuple[torch.Tensor, torch.Tensor]]] = {}
_gives_back: list[RemovableHandle] = []


def _give_back_after(optimizer: torch.optim.Optimizer, weight: torch.Tensor, gradient: torch.Tensor) -> None:
    """Let the weight have its own gradient again once the optimizer's step is done.

    The hook stays once it is needed: a session may be closed by a hook of this kind, and one that is removed
    while torch goes through them ends the step.
    """
    _own_gradients.setdefault(optimizer, []).append((weight, gradient))
    if not _gives_back:
        _gives_back.append(register_optimizer_step_post_hook(_give_back))


def _give_back(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for weight, gradient in _own_gradients.pop(optimizer, ()):
        weight.grad = gradient


def is_dense(tensor: torch.Tensor) -> bool:
    """Do its numbers fill a stretch of memory, each in a place of its own?"""
    filled = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != filled:
            return not tensor.numel()
        filled *= size
    return True


def _order(tensor: torch.Tensor) -> list[int]:
    """The strides that matter: a dimension of one element has none."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


def begin_momentum(optimizer: torch.optim.Optimizer, *_: tuple[Any, ...] | dict[str, Any]) -> None:
    """Give weights of SGD that have none a momentum of zero, which the first step makes their gradient, as
    torch does: fused SGD fails where some have one and some not, and leaves it unwritten where a loss scale
    skips the first step (torch 2.15).
    """
    for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else ():
        begins = group["momentum"] and not group["dampening"]
        for weight in [p for p in group["params"] if p.grad is not None] if begins else ():
            if optimizer.state[weight].get("momentum_buffer") is None:
                optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
