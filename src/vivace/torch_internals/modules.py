"""Private names of modules, of their traces, and of optimizers and schedules."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import fx, nn

from vivace.torch_internals import attribute, named

if TYPE_CHECKING:
    from torch.nn.modules import batchnorm

    BatchNorm = batchnorm._BatchNorm
    RunningNorm = batchnorm._NormBase
else:
    # Libraries derive own layers from these, and not from the public ones.
    BatchNorm = named(
        "torch.nn.modules.batchnorm._BatchNorm",
        lost="BatchNorm is not found, and pieces of a batch change it",
    )
    RunningNorm = named(
        "torch.nn.modules.batchnorm._NormBase", lost="layers that keep running means are not found"
    )

_parameters = attribute(nn.Module, "_parameters", lost="a block cannot run again with the weights it had")
_buffers = attribute(nn.Module, "_buffers", lost="a block cannot run again with the buffers it had")
_children = attribute(nn.Module, "_modules", lost="it is not seen that a part of a model was replaced")
Convolution: TypeAlias = nn.Conv1d | nn.Conv2d | nn.Conv3d

_HOOKS = [
    attribute(nn.Module, name, lost="hooks of a module are not seen, and may run twice or not at all")
    for name in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
]

convert: Callable[[nn.Module, Callable[[torch.Tensor], torch.Tensor]], Any] = named(
    "torch.nn.Module._apply", lost="a copy of the model cannot be tried in another dtype or memory order"
)
"""``(module, function)``: applies the function to every weight and buffer of the tree."""

script_as: Callable[[Callable[..., Any], str], None] = named(
    "torch.jit._builtins._register_builtin",
    lost="a model with narrow convolutions cannot be scripted meanwhile",
)
"""``(function, name)``: where a model is scripted, the function is taken for the operator of that name."""

for _kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
    attribute(_kind, "_conv_forward", lost="convolutions cannot be folded or padded")

FLAT_WEIGHTS = "_flat_weights"
"""The attribute of a recurrent layer from which its forward takes its weights."""
attribute(nn.RNNBase, FLAT_WEIGHTS, lost="recurrent layers cannot run on copies of their weights")
flat_names: Callable[[nn.RNNBase], list[str]] = attribute(
    nn.RNNBase, "_flat_weights_names", lost="recurrent layers cannot run on copies of their weights"
)
"""The names of a recurrent layer's weights, in the order of `FLAT_WEIGHTS`."""

COMPILED_CALL = "_compiled_call_impl"
"""The attribute of a module that is called in the place of all that a call of it does."""
_compiled_call = attribute(nn.Module, COMPILED_CALL, lost="a model cannot be compiled for training alone")
_WRAPPED = "_orig_mod"  # what torch.compile(model) returns has it
_COMPILES, _NEVER_COMPILES = "_torchdynamo_orig_callable", "_torchdynamo_disable"  # of functions
plain_call: Callable[[nn.Module], Callable[..., Any]] = attribute(
    nn.Module, "_call_impl", lost="a model cannot be compiled together with its hooks"
)
"""Everything that a call of a module does, its hooks too, uncompiled."""

_codegen = attribute(fx.Graph, "_codegen", lost="forward functions that take lists cannot be traced")
_FLATTENING: Any = named(
    "torch.fx.graph._PyTreeCodeGen", lost="forward functions that take lists cannot be traced"
)

_STEP_HOOKS = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
_step_hooks = [
    attribute(torch.optim.Optimizer, name, lost="it is not seen that somebody waits for a whole update")
    for name in _STEP_HOOKS
]
_runs_hooks = attribute(
    torch.optim.Optimizer,
    "_patch_step_function",
    lost="an optimizer that never calls torch's own __init__ cannot be verified",
)
INNER_SCHEDULES = "_schedulers"  # in the state of a schedule, too
attribute(
    torch.optim.lr_scheduler.SequentialLR,
    INNER_SCHEDULES,
    lost="a schedule inside of another that is too long, or was changed, is not seen",
)
EXTRA_STATE = "_extra_state"  # what a module adds to its `state_dict` in its own way, by `get_extra_state`
_LOADING = "_load_from_state_dict"
attribute(
    nn.Module, _LOADING, lost="it is not seen that a class of a person's own loads weights in its own way"
)
_loading_hooks = attribute(
    nn.Module, "_load_state_dict_pre_hooks", lost="it is not seen that a model makes room for what it loads"
)
_acts = attribute(torch.autocast, "_enabled", lost="autocast is not seen, and another cannot be tried")
_cast: Any = named(
    "torch.amp.autocast_mode._cast", lost="functions that autocast gives float32 on a GPU get halves on a CPU"
)


def own_tensors(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The dictionaries in which a module holds its own parameters and buffers, or None; no copies."""
    return _parameters(module), _buffers(module)


def loads_in_its_own_way(model: nn.Module) -> bool:
    """May it take a `state_dict` with other entries than its own?"""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    own = {name for kind in kinds if not kind.__module__.startswith("torch.") for name in vars(kind)}
    return not own.isdisjoint((_LOADING, "load_state_dict")) or any(map(_loading_hooks, model.modules()))


def own_parts(module: nn.Module) -> Iterable[nn.Module | None]:
    """The modules that a module holds itself."""
    found: dict[str, nn.Module | None] = _children(module)
    return found.values()


@contextlib.contextmanager
def holding(modules: Iterable[nn.Module], tensors: Iterable[tuple[Any, Any]]) -> Iterator[None]:
    """Let modules hold other ``(parameters, buffers)`` inside the block, and their own again afterwards."""
    modules = list(modules)
    before = [own_tensors(module) for module in modules]
    try:
        for module, (parameters, buffers) in zip(modules, tensors, strict=True):
            module.__dict__.update(_parameters=parameters, _buffers=buffers)
        yield
    finally:
        for module, (parameters, buffers) in zip(modules, before, strict=True):
            module.__dict__.update(_parameters=parameters, _buffers=buffers)


def forward_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """What runs before and after the module's forward."""
    return [hook for read in _HOOKS[:2] for hook in read(module).values()]


def backward_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """What runs before and after the module's backward pass."""
    return [hook for read in _HOOKS[2:] for hook in read(module).values()]


@contextlib.contextmanager
def without_hooks(modules: Iterable[nn.Module], package: str) -> Iterator[None]:
    """Let nothing of a package run before and after the modules' forward inside the block."""
    before = [(own, dict(own)) for module in modules for own in (read(module) for read in _HOOKS[:2]) if own]
    try:
        for own, hooks in before:
            for key, hook in hooks.items():
                if hook.__module__.startswith(package):
                    del own[key]
        yield
    finally:
        for own, hooks in before:
            own.clear()
            own.update(hooks)


def all_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """What runs around the module's forward and backward."""
    return [hook for read in _HOOKS for hook in read(module).values()]


def has_hooks(module: nn.Module) -> bool:
    """Does anything run around the module's forward or backward?"""
    return any(read(module) for read in _HOOKS)


def hooks_of_all(owner: ModuleType) -> int:
    """How many hooks act on every module, or on every optimizer: `owner` is the module that defines these."""
    found = [value for name, value in vars(owner).items() if name.startswith("_global")]
    return sum(len(value) for value in found if isinstance(value, Mapping))


def convolution_with(
    module: Convolution, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """What a convolution's forward does, its way of padding too, with another weight and bias."""
    result: torch.Tensor = module._conv_forward(x, weight, bias)
    return result


def is_compiled(module: nn.Module) -> bool:
    """Did the person compile it, in place or around it?"""
    return bool(_compiled_call(module)) or hasattr(module, _WRAPPED)


def is_compiled_function(function: Callable[..., Any]) -> bool:
    """Did the person compile a function, or a method?"""
    return hasattr(function, _COMPILES) and not hasattr(function, _NEVER_COMPILES)


def form_of_output(graph: fx.Graph) -> Any:
    """The form of what a traced function returns, where its trace has flattened that; else None."""
    flattens = isinstance(_codegen(graph), _FLATTENING)
    return _codegen(graph).pytree_info.out_spec if flattens else None


def give_step_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Let hooks run where its class never calls torch's own `__init__`, as that of many wrappers."""
    if not all(isinstance(getattr(optimizer, name, None), dict) for name in _STEP_HOOKS):
        kinds = ("_optimizer_state_dict", "_optimizer_load_state_dict")
        for name in (*_STEP_HOOKS, *(f"{kind}_{when}_hooks" for kind in kinds for when in ("pre", "post"))):
            setattr(optimizer, name, OrderedDict())
            if not hasattr(type(optimizer), name):  # other objects of the class have none
                setattr(type(optimizer), name, MappingProxyType({}))
        _runs_hooks(optimizer)()


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Does anything of a person's run before or after each update?"""
    return any(read(optimizer) for read in _step_hooks)


def step_with_hooks(optimizer: torch.optim.Optimizer, step: Callable[[Any], object]) -> None:
    """``step(optimizer)`` between the optimizer's own hooks, without those of every optimizer."""
    before, after = (list((read(optimizer) or {}).values()) for read in _step_hooks)
    for hook in before:
        hook(optimizer, (), {})
    step(optimizer)
    for hook in after:
        hook(optimizer, (), {})


def inner_schedules(schedule: object) -> list[Any]:
    """The schedules that one is made of; empty where it is made of none."""
    return list(getattr(schedule, INNER_SCHEDULES, ()))


def is_acting(region: torch.autocast) -> bool:
    """Will this autocast region cast, once it is entered?"""
    return bool(_acts(region))


def let_act(region: torch.autocast, enabled: bool) -> None:
    """Let an autocast region cast or not, whether or not its device is there."""
    region._enabled = enabled


@contextlib.contextmanager
def cast_for(there: str, here: str) -> Iterator[None]:
    """Inside, functions whose inputs autocast casts on a kind of device `there` get those `here` cast."""

    def cast(value: object, device_type: str, dtype: torch.dtype) -> Any:
        return _cast(value, here if device_type == there else device_type, dtype)

    before = torch.amp.autocast_mode._cast
    torch.amp.autocast_mode._cast = cast
    try:
        yield
    finally:
        torch.amp.autocast_mode._cast = before


@contextlib.contextmanager
def acting(region: torch.autocast, enabled: bool, dtype: torch.dtype | None) -> Iterator[None]:
    """Let an autocast region cast or not, and to `dtype` where one is given, if it is entered inside."""
    before = is_acting(region), region.fast_dtype
    region._enabled, region.fast_dtype = enabled, dtype or region.fast_dtype
    try:
        yield
    finally:
        region._enabled, region.fast_dtype = before
