"""Which loops are left alone, wholly or but for their memory and update, and why: what was seen of the first
steps, and a sentence for each kind.
"""

from __future__ import annotations

import dataclasses
import dis
import multiprocessing
import os
import weakref
from collections.abc import Callable, Iterable
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakValueDictionary as Held

import torch
from torch import nn
from torch.nn.modules import module as of_modules

from vivace import words
from vivace.errors import ran_out_of_memory
from vivace.live.methods import Methods
from vivace.machine import NOT_YET, TRAINED_ON
from vivace.tensors.modules import has_sparse_gradients
from vivace.torch_internals.modules import all_hooks, hooks_of_all, is_compiled

LEFT_ALONE: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.LBFGS: "LBFGS evaluates the loss several times a step",
    torch.optim.SparseAdam: "SparseAdam takes sparse gradients",
}
NO_ROOM = "the memory does not hold its model a second time"
MOST_OF_OTHERS = 50  # steps of them to one
OUTSIDE = ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_NAME")  # reach beyond the arguments


@dataclasses.dataclass
class Seen:
    """What a step of a loop showed, and any step did; one ends with the optimizer that stepped first.

    What the script lets go of is not held: it may train many models, one after the other.
    """

    roots: Held[int, nn.Module] = dataclasses.field(default_factory=Held)
    optimizers: Held[int, torch.optim.Optimizer] = dataclasses.field(default_factory=Held)
    calls: int = 0
    backwards: int = 0
    primary: weakref.ref[torch.optim.Optimizer] | None = None
    differentiates_twice: bool = False
    scalers: dict[int, torch.amp.GradScaler] = dataclasses.field(default_factory=dict)  # that scale a loss
    autocasts: bool = False  # around the call of a module, or inside
    compiles: str = ""  # what, as a sentence begins
    methods: Methods = dataclasses.field(default_factory=Methods)
    method: str = "__call__"  # by which the root is called
    parts: tuple[str, ...] = ("",)  # by their names in the root, which that method or the loop calls
    steps_of_others: int = 0  # in a row: of optimizers by which no step ends

    def called(self, module: nn.Module) -> None:
        """The outermost call of a module in training, with gradients on."""
        if id(module) not in self.roots:
            if not any(p.requires_grad for p in module.parameters()):
                return  # a loss, a metric, a transform
            self.roots[id(module)] = module
        self.calls += 1
        self.methods.called(module)

    def entered(self, module: nn.Module) -> None:
        """Any module's call, with gradients on."""
        self.autocasts = self.autocasts or torch.is_autocast_enabled(device_of(module).type)

    def ends_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Is it with this optimizer that a step ends?"""
        self.primary = self.primary or weakref.ref(optimizer)
        return self.primary() is optimizer

    def is_past(self, optimizer: torch.optim.Optimizer) -> bool:
        """Does the script train on with another optimizer than the one that ended its steps?"""
        primary = optimizer if self.primary is None else self.primary()
        self.steps_of_others = 0 if primary is optimizer else self.steps_of_others + 1
        return primary is None or self.steps_of_others > MOST_OF_OTHERS

    def next_step(self) -> None:
        """Forget what belongs to one step: before the first, models may be called for other reasons."""
        self.roots.clear()
        self.optimizers.clear()
        self.calls = self.backwards = 0
        self.methods = Methods()

    def led_by_method(self) -> Seen | None:
        """The same step, of which the root is the module whose method makes all calls, where there is one."""
        found = self.methods.only()
        if found is None:
            return None
        root, name = found
        called = [path for path, part in root.named_modules() if id(part) in self.roots]
        parts = tuple(path for path in called if not any(_is_inside(path, other) for other in called))
        others = Held({id(root): root})
        return dataclasses.replace(self, roots=others, calls=self.methods.calls, method=name, parts=parts)

    @property
    def root(self) -> nn.Module:
        """The module that the loop calls."""
        return next(iter(self.roots.values()))


def _is_inside(path: str, other: str) -> bool:
    """Is the module of that name a part of the other one?"""
    return path != other and (not other or path.startswith(f"{other}."))


def device_of(module: nn.Module) -> torch.device:
    """Where the module's weights are."""
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def is_training(module: nn.Module) -> bool:
    """Is it in training mode? Lightning leaves alone that of what wraps a model for ranks."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return bool(module.module.training)
    return module.training


def why_left_alone(seen: Seen, *, together: bool = False) -> str:
    """Why the loop is left as it is; empty where anything may act. `together`: the processes that train one
    model decide as one.
    """
    return _of_process(together) or _of_optimizer(seen) or _of_kind(seen)


def why_only_the_rest(seen: Seen) -> str:
    """Why nothing may act on the model's calls, though on the process's memory and the update; or empty.

    Where the loop calls parts of a model, a method of the model that does so may take the place of its call:
    then `seen` says so.
    """
    why = _of_loop(seen)
    other = seen.led_by_method() if why else None
    if other is not None and not _of_loop(other):
        seen.roots, seen.calls, seen.method, seen.parts = other.roots, other.calls, other.method, other.parts
        why = ""
    return why or why_of_model(seen.root)


def fault_of(error: Exception) -> str:
    """Why nothing acts any more, where the fault is ours, or there was no memory for what we do."""
    if torch.distributed.is_available() and isinstance(error, torch.distributed.DistError):
        return "its processes no longer reach each other"
    if ran_out_of_memory(error):
        return NO_ROOM
    return f"a fault of Vivace's own, {type(error).__name__}: {error}"


def several() -> bool:
    """Has this process met others that train the same model?"""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _of_process(together: bool) -> str:
    if multiprocessing.parent_process() is not None:
        return "it trains in processes that it starts itself"
    if together:
        return ""
    size = os.environ.get("WORLD_SIZE", "").strip()
    if (size.isdecimal() and int(size) > 1) or several():
        return "several processes train one model together, without DistributedDataParallel around it"
    return ""


def _of_optimizer(seen: Seen) -> str:
    found = (why for o in seen.optimizers.values() for kind, why in LEFT_ALONE.items() if isinstance(o, kind))
    return next(found, "")


def _of_kind(seen: Seen) -> str:
    for root in seen.roots.values():
        kind = type(root).__name__
        if isinstance(root, nn.parallel.DistributedDataParallel) or "FullyShardedDataParallel" in kind:
            return f"its model is wrapped in {kind}"
        if len({p.device for p in root.parameters()}) > 1:
            return "its model lies on several devices"
        if (device := device_of(root).type) not in TRAINED_ON:  # nothing waits for it, so no time is right
            return NOT_YET.get(device, f"its model is on {device}, and Vivace trains on CUDA and processors")
        if has_sparse_gradients([root]):
            return "an embedding of its model has sparse gradients"
    return ""


def _of_loop(seen: Seen) -> str:
    names = ", ".join(sorted({type(module).__name__ for module in seen.roots.values()}))
    if seen.compiles:
        return f"{seen.compiles} compiled by torch.compile"
    if not seen.roots:
        return "no model with weights is called in training: its parts, or its methods, may be"
    if len(seen.roots) > 1:
        return f"it trains several models, or calls parts of one ({names})"
    if len(seen.optimizers) > 1 and not _share(seen.root, seen.optimizers.values()):
        return "several optimizers update its weights, and not those of its model alone"
    if seen.differentiates_twice:
        return "it differentiates gradients (a gradient penalty, or a second order)"
    if len(seen.scalers) > 1:
        return "several GradScalers scale its losses"
    if seen.calls != seen.backwards:
        passes = "1 backward pass" if seen.backwards == 1 else f"{seen.backwards} backward passes"
        return f"it calls its model {words.count(seen.calls, 'time')} for {passes}"
    return ""


def _share(root: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> bool:
    """Does each update weights of the root, and nothing else?"""
    weights = set(map(id, root.parameters()))
    return all(
        id(p) in weights for each in optimizers for group in each.param_groups for p in group["params"]
    )


def why_of_model(root: nn.Module) -> str:
    """Why nothing may act on the calls of a model, whatever calls it; or empty."""
    if isinstance(root, (nn.DataParallel, torch.jit.ScriptModule)):
        return f"its model is wrapped in {type(root).__name__}"
    modules = list(root.modules())
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in modules):
        return "a part of its model is wrapped in DistributedDataParallel"
    if any(map(is_compiled, modules)):
        return "its model is compiled by torch.compile"
    if any(_own_hooks(module) for module in modules) or hooks_of_all(of_modules):
        return "its model has hooks, which would run in a copy as well"
    if any(hasattr(type(module), "__del__") for module in modules):
        return "its model has a '__del__', which would run for a copy as well"
    return ""


def _own_hooks(module: nn.Module) -> bool:
    """Hooks of the person's; those by which torch reparametrizes weights are copied with the module."""
    return any(
        not (type(hook).__module__.startswith("torch.nn.") or _keeps_to_arguments(hook))
        for hook in all_hooks(module)
    )


def _keeps_to_arguments(hook: Callable[..., Any]) -> bool:
    """Does a hook reach nothing but what its module is given and returns, which in a copy is the copy's? So
    does the one that asks for gradients behind a frozen embedding, for adapters that are trained with
    checkpointing. The module may hold what is no copy: a function, a log.
    """
    if not isinstance(hook, FunctionType) or hook.__closure__ or hook.__defaults__ or hook.__kwdefaults__:
        return False
    code = hook.__code__
    steps = list(dis.get_instructions(code))
    names = [name for one in steps for name in (one.argval if type(one.argval) is tuple else [one.argval])]
    outside = any(one.opname in OUTSIDE for one in steps) or any(n in names for n in code.co_varnames[:1])
    return not outside and not any(isinstance(one, CodeType) for one in code.co_consts)
