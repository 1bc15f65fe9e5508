"""Modules: those of a kind, attributes for a while, and a module around a function."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from vivace.operators import NARROWEST_WINDOW
from vivace.tensors.outside import PLAIN, alike, assign, attributes, changed, is_storable, of_library
from vivace.torch_internals.modules import BatchNorm, backward_hooks
from vivace.torch_internals.tensors import gradient_hooks

if TYPE_CHECKING:
    from vivace.tensors.trees import Tree

CONVOLUTIONS: tuple[type[nn.Module], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
CONVOLUTIONS += (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)

Kind = TypeVar("Kind", bound=nn.Module)


def modules_of(model: nn.Module, *kinds: type[Kind]) -> list[Kind]:
    """All modules of the given classes in the tree, each once."""
    return [module for module in model.modules() if isinstance(module, kinds)]


def is_copied_to_devices(model: nn.Module) -> bool:
    """Is a part of it copied to several devices at every call? The copies know the first one's functions."""
    return any(len(part.device_ids) > 1 for part in modules_of(model, nn.DataParallel))


@contextlib.contextmanager
def in_evaluation(models: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, all modules are in evaluation mode, as ``model.eval()`` puts them into it; afterwards each is
    in its own mode again, and what a class's own ``eval()`` or ``train(mode)`` had changed is as it was.
    """
    every = list(models)
    modules = [module for model in every for module in model.modules()]
    modes = [module.training for module in modules]
    models = [model for model in every if any(module.training for module in model.modules())]
    held = _Held(models)
    try:
        for model in models:
            try:
                model.eval()
            except NotImplementedError:  # of a program that torch.export has made
                for module in model.modules():
                    module.training = False
        held.keep_what_changed()
        yield
    finally:
        before = _Held(models)  # the metric may have changed more
        try:
            for module, mode in zip(modules, modes, strict=True):
                if _has_own_modes(module) and module.training is not mode:
                    with contextlib.suppress(NotImplementedError):
                        module.train(mode)
        finally:
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode
            before.put_back()
            held.put_back()


def _has_own_modes(module: nn.Module) -> bool:
    """Does it do more than torch where it is put into a mode?"""
    kind = type(module)
    is_plain = kind.train is nn.Module.train and kind.eval is nn.Module.eval
    return not is_plain or not {"train", "eval"}.isdisjoint(vars(module))


def _has_a_persons_modes(module: nn.Module) -> bool:
    """Is what it does where it is put into a mode a person's code, which may reach any part of a model?"""
    kind = type(module)
    own = [named for named in (kind.train, kind.eval) if not of_library(named.__module__)]
    return bool(own) or not {"train", "eval"}.isdisjoint(vars(module))


class _Held:
    """What putting models into another mode may change: weights, buffers and plain attributes, in main
    memory, and which weights are trained. Of a library's modules their own alone, of all that have no modes
    of their own nothing.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.models = [model for model in models if any(map(_has_a_persons_modes, model.modules()))]
        owners: list[tuple[nn.Module, bool]] = [(model, True) for model in self.models]
        whole = set(map(id, self.models))
        parts = (module for model in models if id(model) not in whole for module in model.modules())
        owners += [(module, False) for module in parts if _has_own_modes(module)]
        weights = [p for module, all_of_it in owners for p in module.parameters(recurse=all_of_it)]
        tensors = [*weights, *(b for module, all_of_it in owners for b in module.buffers(recurse=all_of_it))]
        plain = [t for t in tensors if type(t) in (torch.Tensor, nn.Parameter) and is_storable(t)]
        self.attributes = attributes(self.models)
        self.tensors = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in plain]
        self.trained = [(weight, weight.requires_grad) for weight in weights]

    def keep_what_changed(self) -> None:
        """Forget all that is as it was."""
        changes = changed(attributes(self.models), self.attributes)
        self.attributes = {key: self.attributes[key] for key in changes if key in self.attributes}
        self.tensors = [(tensor, then) for tensor, then in self.tensors if not alike(tensor.data, then)]
        self.trained = [(weight, then) for weight, then in self.trained if weight.requires_grad is not then]

    def put_back(self) -> None:
        """Write the rest where it is not yet as it was."""
        now = attributes(self.models)
        others = {key: then for key, then in self.attributes.items() if not alike(now.get(key), then)}
        assign(self.models, others)
        with torch.no_grad():
            for tensor, then in self.tensors:
                if not alike(tensor.data, then):
                    tensor.copy_(then)
        for weight, trained in self.trained:
            if weight.requires_grad is not trained:
                weight.requires_grad_(trained)


def has_batch_norm(model: nn.Module, over_ranks: bool = False) -> bool:
    """Does training this model mix the samples of a batch through BatchNorm?

    With `over_ranks`: those of one rank alone, as all but SyncBatchNorm do.
    """
    found = modules_of(model, BatchNorm)
    return any(not (over_ranks and isinstance(norm, nn.SyncBatchNorm)) for norm in found)


def kinds_of(modules: Iterable[nn.Module]) -> dict[str, bool]:
    """Which kinds of layers that techniques act on are among these modules or inside of them."""
    parts = [part for module in modules for part in module.modules()]
    kinds: dict[str, tuple[type[nn.Module], ...]] = {
        "convolution_2d": (nn.Conv2d, nn.ConvTranspose2d),
        "recurrent": (nn.RNNBase, nn.RNNCellBase),
        "stepwise_recurrent": (nn.GRU, nn.RNN),
        "dropout": DROPOUTS,
        "batch_norm": (BatchNorm,),
    }
    return {name: any(isinstance(part, classes) for part in parts) for name, classes in kinds.items()}


def has_float32(models: Sequence[nn.Module]) -> bool:
    """Is any weight float32? Autocast and casts of weights leave float64 and 16-bit ones alone."""
    return any(p.dtype == torch.float32 for model in models for p in model.parameters())


def looked_at_by_hooks(model: nn.Module) -> tuple[str, str]:
    """The names of a weight and of a module at whose gradients a hook of a person's looks; each empty where
    there is none.
    """

    def of_person(hook: Callable[..., Any]) -> bool:
        while isinstance(hook, functools.partial):
            hook = hook.func
        return not str(getattr(hook, "__module__", "")).startswith(("vivace.", "torch."))

    weights = (name for name, p in model.named_parameters() if any(map(of_person, gradient_hooks(p))))
    modules = (name for name, m in named_modules([model]) if any(map(of_person, backward_hooks(m))))
    return next(weights, ""), next(modules, "")


def has_sparse_gradients(models: Iterable[nn.Module]) -> bool:
    """Has an embedding sparse gradients? What else goes by that name, such as a layer, is none."""
    return any(getattr(module, "sparse", False) is True for model in models for module in model.modules())


def named_parameters(models: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Those of all models, by the names that the person knows. Of several models the name begins with the
    model's number: ``1.head.weight``.
    """
    for before, model in _numbered(models):
        yield from ((before + name, parameter) for name, parameter in model.named_parameters())


def trained_in(models: Iterable[nn.Module]) -> list[int]:
    """The parameters of all models that are trained, each by its `id`."""
    return [id(weight) for model in models for weight in model.parameters() if weight.requires_grad]


def named_buffers(models: Iterable[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of all models, named as `named_parameters` does."""
    for before, model in _numbered(models):
        yield from ((before + name, buffer) for name, buffer in model.named_buffers())


def named_modules(models: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Those of all models, named as `named_parameters` does; a model itself: ``the model`` or its number."""
    for before, model in _numbered(models):
        yield from (
            ((before + name).rstrip(".") or "the model", part) for name, part in model.named_modules()
        )


def _numbered(models: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Each model with what its names begin with."""
    every = list(models)
    numbers = (f"{number}." for number in itertools.count()) if len(every) > 1 else itertools.repeat("")
    yield from zip(numbers, every, strict=False)


@contextlib.contextmanager
def patched(modules: Sequence[nn.Module], name: str, values: Sequence[Any]) -> Iterator[None]:
    """Give each module its own instance attribute `name` inside the block, and only there.

    `__dict__` and not `vars`, which torch.compile cannot trace behind a graph break. A module may stand there
    twice, as one that two models share does.
    """
    before = [module.__dict__.get(name) for module in modules]
    for module, value in zip(modules, values, strict=True):
        module.__dict__[name] = value
    try:
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            if value is None:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = value


def placed(modules: Sequence[nn.Module], name: str, values: Sequence[Any]) -> Callable[[], None]:
    """Give each module its own instance attribute `name` until what is returned is called.

    In whatever order several give theirs back, the one that came last and is still there acts.
    """
    undo = contextlib.ExitStack()
    for module, value in zip(modules, values, strict=True):
        before = [vars(module).get(name)]
        vars(module)[name] = value
        _PLACED.setdefault(module, {}).setdefault(name, []).append(before)
        undo.callback(_give_back, module, name, before)
    return undo.close


# What each found, in the order in which they came. A model that goes with its sessions open is not held here.
_PLACED: weakref.WeakKeyDictionary[nn.Module, dict[str, list[list[Any]]]] = weakref.WeakKeyDictionary()


def _give_back(module: nn.Module, name: str, before: list[Any]) -> None:
    found = _PLACED[module][name]
    place = next(number for number, other in enumerate(found) if other is before)
    del found[place]
    if place < len(found):
        found[place][0] = before[0]
    elif before[0] is None:
        vars(module).pop(name, None)
    else:
        vars(module)[name] = before[0]


class Lent:
    """A function in the place of a module's forward for a while.

    A copy of the module that is made meanwhile, such as a target network, has its own forward, and so has
    what is read from a pickle.
    """

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        self.own, self.function = module.forward, function
        self.__wrapped__ = self.own  # whose arguments a model may ask for, as Hugging Face's `generate` does
        self.__name__ = str(getattr(function, "__name__", "forward"))  # which a model may read

    def __call__(self, *arguments: object, **named: object) -> Any:
        """What the function returns."""
        return self.function(*arguments, **named)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.own, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (self.own,)


def lent_forwards(
    models: Sequence[nn.Module], around: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], list[Lent]]:
    """What gives, at each call, a function `around` each model's forward as it is then. Around one that
    stays it stays, as code is compiled for it.
    """
    found: dict[nn.Module, Lent] = {}

    def now() -> list[Lent]:
        for model in models:
            if model not in found or found[model].own != model.forward:
                found[model] = Lent(model, around(model.forward))
        return [found[model] for model in models]

    return now


@contextlib.contextmanager
def untouched(root: nn.Module) -> Iterator[list[str]]:
    """Inside, copies of `root` are run; if one runs parts of `root` itself, what that changes is put back.

    The list names afterwards what of that was a buffer or a plain attribute.
    """
    changed: list[str] = []
    modules = [(name, module, set(vars(module)), _plain(module)) for name, module in root.named_modules()]
    with torch.no_grad():
        buffers = [(name, buffer, buffer.clone()) for name, buffer in root.named_buffers()]
        grads = [(p, p.grad, p.grad.clone() if p.grad is not None else None) for p in root.parameters()]
    try:
        yield changed
    finally:
        with torch.no_grad():
            for name, buffer, values in buffers:
                if not torch.equal(buffer, values):  # else it counts as changed, to a graph that is kept
                    is_other = not torch.allclose(buffer, values, rtol=0.0, atol=0.0, equal_nan=True)
                    changed += [name] * is_other
                    buffer.copy_(values)
            for parameter, grad, gradient in grads:
                parameter.grad = grad
                if grad is not None and gradient is not None:
                    grad.copy_(gradient)
        for name, module, names, plain in modules:
            changed += [f"{name}.{key}".lstrip(".") for key in _put_back(module, names, plain)]


def _plain(module: nn.Module) -> dict[str, Any]:
    # By type: a weak reference to what is gone raises where it is asked for its class.
    space = vars(module)
    return {k: v for k, v in space.items() if issubclass(type(v), PLAIN) and not k.startswith("_")}


def _put_back(module: nn.Module, names: set[str], before: dict[str, Any]) -> list[str]:
    """Give a module, whose attributes had these names, the plain ones that it had; those that were others."""
    space = vars(module)
    others = [name for name, value in before.items() if not alike(space.get(name), value)]
    others += _plain(module).keys() - names
    for name in others:
        space.pop(name, None)
    space.update({name: before[name] for name in others if name in before})
    return others


def is_product(module: nn.Conv2d) -> bool:
    """Is a convolution a matrix product of pixels by channels: has it a 1x1 window, one group, no padding?"""
    return module.kernel_size == (1, 1) and module.groups == 1 and padding_of(module) == (0, 0)


def is_slow_depthwise(module: nn.Conv2d) -> bool:
    """Is a convolution depthwise and not a plain 3x3? Its gradients are slow in libraries for CPUs."""
    usual = max(module.kernel_size) <= 3 and max(both(module.stride) + both(module.dilation)) == 1
    return 1 < module.groups == module.in_channels == module.out_channels and not usual


def is_wide_window(module: nn.Conv2d) -> bool:
    """Has a convolution a 3x3 window, stride, dilation and group of one, zeros around, and many channels?"""
    padding, once = padding_of(module), max(both(module.stride) + both(module.dilation)) == module.groups == 1
    plain = once and module.padding_mode == "zeros" and padding is not None and max(padding) <= 2
    wide = min(module.in_channels, module.out_channels) >= NARROWEST_WINDOW
    return plain and wide and both(module.kernel_size) == (3, 3)


def lies_in_nhwc(maps: torch.Tensor) -> bool:
    """Lie feature maps, or weights, in channels-last order?"""
    return maps.is_contiguous(memory_format=torch.channels_last)


def in_nhwc(maps: torch.Tensor) -> torch.Tensor:
    """Feature maps in channels-last order, copied where they lie otherwise."""
    return maps.contiguous(memory_format=torch.channels_last)


def both(setting: int | Sequence[int]) -> tuple[int, int]:
    """A convolution's setting by rows and columns: who sets it later may give one number for both."""
    return (setting, setting) if isinstance(setting, int) else (setting[0], setting[-1])


def padding_of(module: nn.Conv2d) -> tuple[int, int] | None:
    """Pixels of zeros before and after rows and columns; None where both sides differ."""
    if not isinstance(module.padding, str):
        return both(module.padding)
    if module.padding == "valid":
        return (0, 0)
    high, wide = (d * (k - 1) for d, k in zip(both(module.dilation), both(module.kernel_size), strict=True))
    return (high // 2, wide // 2) if high % 2 == wide % 2 == 0 else None


def lookup(module: nn.Embedding, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """An embedding's forward to `dtype` from its rows as they are now, in whose own type gradients add up."""
    rows, options = module.weight, (module.padding_idx, module.max_norm, module.norm_type)
    more = module.scale_grad_by_freq, module.sparse
    return lambda tokens: nn.functional.embedding(tokens, rows, *options, *more).to(dtype)


class Shell(nn.Module):
    """A module whose forward is the job's forward seam, so that module wrappers can act on the model and its
    loss.

    Args:
        model: the person's model; its parameters appear below the name ``model``.
        function: ``(batch) -> scalar loss``, which calls `model`.
    """

    def __init__(self, model: nn.Module, function: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self.function = function

    def forward(self, batch: Tree) -> torch.Tensor:
        """The scalar loss of a batch."""
        return self.function(batch)
