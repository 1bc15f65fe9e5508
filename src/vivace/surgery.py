"""Shared helpers for batches and module trees, used by techniques and by the engine."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
from collections import UserDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader

from vivace.errors import Refused


def map_tensors(batch: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """A copy of `batch` with `function` applied to each tensor in tuples, lists, mappings and dataclasses."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(item, function) for item in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(map_tensors(item, function) for item in batch)
    if isinstance(batch, dict):
        return type(batch)({key: map_tensors(value, function) for key, value in batch.items()})
    if isinstance(batch, UserDict):  # such as transformers' BatchEncoding
        return type(batch)({key: map_tensors(value, function) for key, value in batch.items()})
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {
            f.name: map_tensors(getattr(batch, f.name), function) for f in dataclasses.fields(batch) if f.init
        }
        return dataclasses.replace(batch, **fields)
    return batch


def tensors(batch: Any) -> Iterator[torch.Tensor]:
    """Every tensor of a batch, depth first."""
    found: list[torch.Tensor] = []
    map_tensors(batch, found.append)
    return iter(found)


def cast(batch: Any, before: torch.dtype, after: torch.dtype) -> Any:
    """A copy of `batch` in which tensors of dtype `before` have dtype `after`."""
    return map_tensors(batch, lambda tensor: tensor.to(after) if tensor.dtype == before else tensor)


def batch_size(batch: Any) -> int:
    """Samples in a batch: the length of its first tensor that has a dimension, else 1."""
    return next((int(t.shape[0]) for t in tensors(batch) if t.dim()), 1)


def split(batch: Any, size: int) -> list[Any]:
    """Cut a batch into pieces of at most `size` samples; tensors of another length stand in every piece."""
    total = batch_size(batch)

    def piece(start: int) -> Any:
        return map_tensors(batch, lambda t: t[start : start + size] if t.dim() and t.shape[0] == total else t)

    return [piece(start) for start in range(0, total, size)]


def joined(batches: Sequence[Any]) -> Any:
    """One batch of several, the inverse of `split`; None where their tensors differ in shape or number."""
    total, found = batch_size(batches[0]), [list(tensors(batch)) for batch in batches]
    if len({tuple((t.shape[1:], t.dtype) for t in each) for each in found}) > 1:
        return None
    rows = iter(zip(*found, strict=True))

    def join(first: torch.Tensor) -> torch.Tensor:
        group = next(rows)
        return torch.cat(group) if first.dim() and first.shape[0] == total else first

    return map_tensors(batches[0], join)


def modules_of(model: nn.Module, *kinds: type[nn.Module]) -> list[nn.Module]:
    """All modules of the given classes in the tree, each once."""
    return [module for module in model.modules() if isinstance(module, kinds)]


def has_batch_norm(model: nn.Module) -> bool:
    """Does training this model mix the samples of a batch through BatchNorm?"""
    return bool(modules_of(model, nn.modules.batchnorm._BatchNorm))


def has_float32(models: Sequence[nn.Module]) -> bool:
    """Is any weight float32? Autocast and casts of weights leave float64 and 16-bit ones alone."""
    return any(p.dtype == torch.float32 for model in models for p in model.parameters())


def with_other(loader: DataLoader[Any], dataset: Any = None, batch_sampler: Any = None) -> DataLoader[Any]:
    """The same DataLoader over another dataset, or with another batch sampler."""
    same = loader.num_workers, loader.prefetch_factor or 2, loader.persistent_workers
    return with_workers(loader, *same, dataset, batch_sampler)


def with_workers(
    loader: DataLoader[Any],
    num_workers: int,
    prefetch_factor: int,
    persistent: bool,
    dataset: Any = None,
    batch_sampler: Any = None,
) -> DataLoader[Any]:
    """A DataLoader with the same sampler and functions, with another number of worker processes.

    `dataset` and `batch_sampler` stand in for its own where they are given.
    """
    same: dict[str, Any] = {
        name: getattr(loader, name)
        for name in ("collate_fn", "pin_memory", "worker_init_fn", "generator", "in_order")
    }
    if batch_sampler is not None or (loader.batch_size is None and loader.batch_sampler is not None):
        same["batch_sampler"] = loader.batch_sampler if batch_sampler is None else batch_sampler
    else:
        same.update(batch_size=loader.batch_size, sampler=loader.sampler, drop_last=loader.drop_last)
    if num_workers:
        same.update(
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent,
            multiprocessing_context=loader.multiprocessing_context,
            timeout=loader.timeout,
        )
    return DataLoader(loader.dataset if dataset is None else dataset, num_workers=num_workers, **same)


def small_batch(loader: DataLoader[Any]) -> Any:
    """The first two readable samples of a loader's dataset, or the first batch of one that gives batches.

    Collated, with equal random numbers in each call; the random streams are given back.
    """
    dataset: Any = loader.dataset
    collate = getattr(dataset, "collate", loader.collate_fn)  # the engine's own datasets collate themselves
    samples = list[Any]()
    with _streams_given_back():
        for index in range(min(16, len(dataset))):
            random.seed(0), numpy.random.seed(0), torch.default_generator.manual_seed(0)
            with contextlib.suppress(OSError, RuntimeError, ValueError):
                samples.append(dataset[index])
            if samples and getattr(dataset, "single", loader.batch_sampler is None):
                return collate(samples[0])
            if len(samples) == 2:
                break
        return collate(samples)


def draws_random_numbers(dataset: Any) -> bool:
    """Does reading a sample draw from the random stream of torch, NumPy or Python? True if unreadable."""
    return notices(dataset, lambda: _comparable(_random_states()))


def notices(dataset: Any, look: Callable[[], Any]) -> bool:
    """Does ``look()`` see something else once a sample has been read? True if unreadable.

    The random streams are given back as they were.
    """
    before = look()
    with _streams_given_back():
        try:
            dataset[0]
        except Exception:  # the dataset is a person's code, and its keys need not be numbers
            return True
        return bool(before != look())


@contextlib.contextmanager
def _streams_given_back() -> Iterator[None]:
    streams = _random_states()
    try:
        yield
    finally:
        torch.set_rng_state(streams[0])
        numpy.random.set_state(streams[1])
        random.setstate(streams[2])


def _random_states() -> tuple[Any, Any, Any]:
    return torch.get_rng_state(), numpy.random.get_state(), random.getstate()


def _comparable(states: tuple[Any, Any, Any]) -> list[Any]:
    _, words, *position = states[1]
    return [states[0].tolist(), words.tolist(), position, states[2]]


@contextlib.contextmanager
def patched(modules: Sequence[nn.Module], name: str, values: Sequence[Any]) -> Iterator[None]:
    """Give each module its own instance attribute `name` inside the block, and only there."""
    before = [vars(module).get(name) for module in modules]
    for module, value in zip(modules, values, strict=True):
        vars(module)[name] = value
    try:
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            if value is None:
                del vars(module)[name]
            else:
                vars(module)[name] = value


def sum_in_float32(build: Any) -> None:
    """Let sums of half-precision numbers be rounded when they are complete, until the build closes.

    On a CPU every LayerNorm computes in fp32, between inputs and outputs as they were: torch's kernel adds up
    the gradients of weight and bias in the type of the inputs. A sum of thousands of rows stops growing in
    sixteen bits: over 8,192 of them nine tenths of a bias's gradient were lost.

    Everywhere a linear layer gets its inputs contiguous: ``at::linear`` multiplies others without the bias,
    such as the batch-first output of an LSTM, and adds it to what is rounded already.

    A `log_softmax` in the model gives fp32: near log(number of classes) sixteen bits step by half a percent,
    so that before training all losses are off in the same direction.
    """

    summing = {nn.Linear: _of_contiguous} | (
        {nn.LayerNorm: _of_float32} if build.device.type == "cpu" else {}
    )
    undo = contextlib.ExitStack()
    for kind, method in summing.items():
        found = [m for model in build.models for m in modules_of(model, kind) if "forward" not in vars(m)]
        undo.enter_context(patched(found, "forward", [MethodType(method, module) for module in found]))
    build.on_close(undo.close)
    build.set_flag(nn.functional, "log_softmax", partial(_in_float32, nn.functional.log_softmax))


def _in_float32(function: Any, input: torch.Tensor, *others: Any, **named: Any) -> Any:
    half = input.dtype in (torch.float16, torch.bfloat16)
    return function(input.float() if half else input, *others, **named)


def _of_float32(self: Any, input: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = type(self).forward(self, input.float())
    return result.to(input.dtype)


def _of_contiguous(self: Any, input: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
    result: torch.Tensor = type(self).forward(self, input.contiguous(), *others, **named)
    return result


# Bound methods, and by this name: copies and pickles of a model then get methods of their own modules.
_of_float32.__name__ = _of_contiguous.__name__ = "forward"


def lookup(module: Any, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """An embedding's forward to `dtype` from its rows as they are now, in whose own type gradients add up."""
    rows, options = module.weight, (module.padding_idx, module.max_norm, module.norm_type)
    more = module.scale_grad_by_freq, module.sparse
    return lambda tokens: nn.functional.embedding(tokens, rows, *options, *more).to(dtype)


def set_fp32_precision(build: Any, owners: Sequence[Any], precision: str) -> None:
    """Set how `owners` (such as ``torch.backends.cudnn.conv``) round fp32 inputs, until `build` closes.

    torch's older switches ``allow_tf32`` follow: where they say something else, reading them raises, which
    ``torch.backends.cudnn.flags`` and parts of ``torch.compile`` do.
    """
    backends: Any = torch.backends
    older = (backends.cuda.matmul, backends.cudnn)
    before = [owner.fp32_precision for owner in owners]
    allowed: list[bool] = []
    with contextlib.suppress(RuntimeError):  # the person mixed both kinds, and cannot read the older one
        allowed = [owner.allow_tf32 for owner in older]

    def write(precisions: Sequence[str], switches: Sequence[bool]) -> None:
        for owner, switch in zip(older, switches, strict=False):
            owner.allow_tf32 = switch
        for owner, value in zip(owners, precisions, strict=True):
            owner.fp32_precision = value

    write([precision] * len(owners), [precision == "tf32" for _ in allowed])
    build.on_close(lambda: write(before, allowed))


def switch_optimizer(optimizer: torch.optim.Optimizer, settings: Mapping[str, Any]) -> Callable[[], None]:
    """Set `settings` in every parameter group, again after a checkpoint is loaded; returns what undoes it.

    A saved `state_dict` keeps the person's own values. Step counters live on the device while they have to.
    """
    before = [{key: group[key] for key in settings if key in group} for group in optimizer.param_groups]

    def move_steps() -> None:
        for group in optimizer.param_groups:
            on_device = group.get("fused") or group.get("capturable")
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                if isinstance(state.get("step"), torch.Tensor):
                    state["step"] = state["step"].to(parameter.device if on_device else "cpu")

    def switch(_: Any = None) -> None:
        for group in optimizer.param_groups:
            group.update({key: value for key, value in settings.items() if key in group})
        move_steps()

    def hide(_: Any, state: dict[str, Any]) -> None:
        for group, own in zip(state["param_groups"], before, strict=True):
            group.update(own)

    def undo() -> None:
        for hook in hooks:
            hook.remove()
        for group, own in zip(optimizer.param_groups, before, strict=True):
            group.update(own)
        move_steps()

    switch()
    hooks = [
        optimizer.register_load_state_dict_post_hook(switch),
        optimizer.register_state_dict_post_hook(hide),
    ]
    return undo


def coupled(optimizer: torch.optim.Optimizer) -> str:
    """Why the parameters of an optimizer cannot be updated one by one; empty where they can."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim") or isinstance(optimizer, torch.optim.LBFGS):
        return f"{kind.__name__} may look at all parameters at once"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return f"{kind.__name__} has hooks that wait for a whole step"
    return ""


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


def align_state(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Give every optimizer state of a parameter's shape the parameter's memory order.

    Fused optimizers walk through memory and not through indices: another order silently mixes up elements.
    """
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                like = isinstance(value, torch.Tensor) and value.shape == parameter.shape
                if like and _order(value) != _order(parameter):
                    state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _order(tensor: torch.Tensor) -> list[int]:
    """The strides that matter: a dimension of one element has none."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


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

    def forward(self, batch: Any) -> torch.Tensor:
        """The scalar loss of a batch."""
        return self.function(batch)


def lengths_of(dataset: Any, seconds: float) -> list[int]:
    """The length of every sample: of its first tensor or list that has one. Reads them all once.

    The random streams are given back. Raises Refused where that would take more than `seconds`.
    """
    found, begin = list[int](), time.monotonic()
    with _streams_given_back():
        for index in range(len(dataset)):
            found.append(_length_of(dataset[index]))
            spent = time.monotonic() - begin
            if index == 63 and spent / 64 * len(dataset) > seconds:
                raise Refused(f"reading the lengths of {len(dataset):,} samples would take too long")
    return found


def _length_of(sample: Any) -> int:
    if not isinstance(sample, Collection) or getattr(sample, "ndim", 1) == 0:
        return 1
    if isinstance(sample, torch.Tensor | numpy.ndarray | str):
        return len(sample)
    for value in sample.values() if isinstance(sample, Mapping) else sample:
        if isinstance(value, list | tuple | str) or getattr(value, "ndim", 0) > 0:
            return len(value)
    return len(sample)
