"""Decisive experiments: a copy of the model runs the last batch with and without a setting.

The person's model, optimizer and random streams are not touched; a copy costs the memory of one more step.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from vivace.inspection.limits import free_memory, peak_memory
from vivace.profiling.record import bounding
from vivace.profiling.record.guard import Guard
from vivace.profiling.record.hooks import Patches
from vivace.profiling.record.shadow import Allowance, Shadow, compare, same_random_streams
from vivace.profiling.record.silence import nothing_written, silence
from vivace.profiling.record.sites import calling_site
from vivace.tensors.modules import untouched
from vivace.tensors.outside import Outside
from vivace.tensors.settings import on_threads
from vivace.tensors.trees import batch_size, tensors
from vivace.torch_internals.modules import acting, all_hooks

TOTAL_SECONDS = 3.0  # that all experiments together may keep the script waiting, but for one's fewest blocks


class CallCatcher:
    """Keeps the arguments of the last call of each outermost module, its rows, and the autocast around it."""

    def __init__(self, roots: dict[str, nn.Module], guard: Guard) -> None:
        self.roots = roots
        self.calls: dict[str, tuple[Any, Any]] = {}
        self.returned: dict[str, int] = {}  # rows of what the call returned
        self.autocast: dict[str, tuple[bool, torch.dtype]] = {}
        self._handles = [
            module.register_forward_pre_hook(guard.looking(self._catch(name)), with_kwargs=True)
            for name, module in roots.items()
        ]
        self._handles += [
            module.register_forward_hook(guard.looking(self._catch_rows(name)))
            for name, module in roots.items()
        ]

    def restore(self) -> None:
        """Remove the hooks that keep calls."""
        for handle in self._handles:
            handle.remove()

    def largest(self) -> str:
        """The name of the called module with the most weights."""
        return max(self.calls, key=lambda name: sum(p.numel() for p in self.roots[name].parameters()))

    def num_rows(self) -> int:
        """Samples in the last call of the largest module. Where one row came back for each of the second
        dimension, the first is time.
        """
        if not self.calls:
            return 0
        call, returned = list(self.calls[self.largest()]), self.returned.get(self.largest())
        rows = batch_size(call)
        shape = next((tuple(t.shape) for t in tensors(call) if t.dim()), ())
        over_time = returned is not None and shape[:2] == (rows, returned) and rows != returned
        return int(returned or 0) if over_time else rows

    def _catch(self, name: str) -> Any:
        def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            device = next((p.device.type for p in module.parameters()), "cpu")
            if torch.is_grad_enabled():
                self.calls[name] = (arguments, keywords)
                self.autocast[name] = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))

        return hook

    def _catch_rows(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...], result: object) -> None:
            if torch.is_grad_enabled():
                self.returned[name] = batch_size([result])

        return hook


def watch_settings(patches: Patches, document: dict[str, Any]) -> list[Callable[[], Any]]:
    """Note which settings the person's code asks for: torch.compile, channels-last, threads.

    Returns weak references to what torch.compile returned: a result that nobody kept cannot run.
    """
    asked: dict[str, str] = document.setdefault("asked", {})
    compiled: list[Callable[[], Any]] = []

    def noting(name: str, when: Callable[..., bool] = _always) -> Callable[[Any], Any]:
        def make(original: Callable[..., Any]) -> Any:
            def call(*arguments: object, **keywords: object) -> Any:
                if name not in asked and when(*arguments, **keywords):
                    asked[name] = calling_site()
                result = original(*arguments, **keywords)
                if name == "compile":
                    kept = result if result is not None else arguments[0]
                    with contextlib.suppress(TypeError):
                        compiled.append(weakref.ref(kept))
                return result

            return call

        return make

    def channels_last(*_: object, memory_format: object = None, **__: object) -> bool:
        return memory_format is torch.channels_last

    patches.replace(torch, "compile", noting("compile"))
    patches.replace(nn.Module, "compile", noting("compile"))
    patches.replace(nn.Module, "to", noting("channels_last", channels_last))
    patches.replace(torch, "set_num_threads", noting("threads"))
    patches.replace(nn.DataParallel, "__init__", noting("data_parallel"))
    return compiled


def run(
    catcher: CallCatcher | None, optimizers: Sequence[torch.optim.Optimizer], document: dict[str, Any]
) -> None:
    """The experiments that what was seen calls for; results stand under ``experiments``.

    Each holds speed ratios of neighbouring blocks: how many times faster without the setting.
    """
    done: dict[str, Any] = document.setdefault("experiments", {})
    document["asked"] = dict(document.get("asked", {}))  # what the experiments set is not the person's wish
    if catcher is None or not catcher.calls:
        return
    name = catcher.largest()
    module, call, autocast = _alone(catcher.roots[name]), catcher.calls[name], catcher.autocast[name]
    if module is None:
        return
    device = next((p.device.type for p in module.parameters()), "cpu")
    used = autocast[0] or bool((document.get("precision") or {}).get("autocast"))
    contexts = _contexts(device, used, document)
    changes = _changes(module, document)
    if not (contexts or changes or bounding.is_wanted(document)):
        return
    if device == "cpu" and free_memory() < peak_memory():  # the system would end the script
        document["untried"] = "the memory does not hold the model a second time"
        return
    allowance = Allowance(TOTAL_SECONDS)
    with _unnoticed(module):
        shadow = Shadow(module, call, (device, *autocast))
        trains = bool(shadow.losses())
        if not trains:  # half of a step tells nothing of a whole one
            document["untried"] = "nothing that the model returns has gradients"
            contexts, changes = {}, {}
        for setting, context in contexts.items():
            if not allowance.is_spent:
                done[setting] = compare(shadow.runner(), shadow.runner(context), allowance)
        for setting, change in changes.items():
            if not allowance.is_spent:
                other = Shadow(module, call, (device, *autocast))
                change(other)
                done[setting] = compare(shadow.runner(), other.runner(), allowance)
        bounding.run(shadow if trains else None, optimizers, document, allowance)
    document["paused_seconds"] = allowance.used_seconds


@contextlib.contextmanager
def _unnoticed(module: nn.Module) -> Iterator[None]:
    """Inside, copies of the module run; what its code and its hooks print, note and draw then is as if they
    had not.
    """
    outside = Outside([hook for part in module.modules() for hook in all_hooks(part)], [module])
    try:
        with same_random_streams(), untouched(module), silence(), nothing_written(RuntimeError):
            yield
    finally:
        outside.put_back()


def _alone(module: nn.Module) -> nn.Module | None:
    """The module without what makes it wait for other ranks; None if there is none."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return module
    if torch.distributed.get_world_size() == 1:
        return module
    inner = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else None
    exchanging = (nn.SyncBatchNorm, nn.parallel.DistributedDataParallel)
    return None if inner is None or any(isinstance(m, exchanging) for m in inner.modules()) else inner


def _contexts(device: str, autocast: bool, document: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Settings that a context turns off, for those that are on."""
    found: dict[str, Callable[[], Any]] = {}
    threads, cores = torch.get_num_threads(), document["flags"]["cores"]
    if autocast and sizes_of(document) == {4}:
        found["autocast_reached"] = lambda: _autocast_everywhere(enabled=True, dtype=_fast_dtype(document))
    elif autocast:
        found["autocast"] = lambda: _autocast_everywhere(enabled=False)
    if device == "cpu" and threads != cores:
        found["threads"] = lambda: on_threads(cores)
    if torch.is_anomaly_enabled():
        found["anomaly"] = lambda: torch.autograd.set_detect_anomaly(False)
    if torch.are_deterministic_algorithms_enabled():
        found["deterministic"] = _nondeterministic
    backends: Any = torch.backends
    if device == "cpu" and not backends.mkldnn.enabled:
        found["onednn"] = lambda: backends.mkldnn.flags(enabled=True)
    return found


def _changes(module: nn.Module, document: dict[str, Any]) -> dict[str, Callable[[Any], None]]:
    """Settings of the model itself, with how to undo them in a copy."""
    found: dict[str, Callable[[Any], None]] = {}
    if any(p.dtype == torch.float64 for p in module.parameters()):
        found["double"] = lambda shadow: shadow.convert(lambda t: t.float() if t.is_floating_point() else t)
    if "channels_last" in document.get("asked", {}):
        found["channels_last"] = lambda shadow: shadow.convert(torch.Tensor.contiguous)
    return found


@contextlib.contextmanager
def _autocast_everywhere(*, enabled: bool, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Every region that is entered inside acts, or none does, wherever the model's own code enters it."""
    original: Any = torch.autocast.__enter__

    def enter(region: torch.autocast) -> Any:
        with acting(region, enabled, dtype):
            return original(region)

    torch.autocast.__enter__ = enter  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__enter__ = original  # type: ignore[method-assign]


def sizes_of(document: dict[str, Any]) -> set[int]:
    """Bytes of the numbers that matrix operators computed with."""
    return {int(name.partition(":")[2]) for name in document.get("item_bytes") or {}}


def _fast_dtype(document: dict[str, Any]) -> torch.dtype:
    names = (document.get("precision") or {}).get("autocast_dtypes") or {"bfloat16": 1}
    found: torch.dtype = getattr(torch, next(iter(names)))
    return found


@contextlib.contextmanager
def _nondeterministic() -> Iterator[None]:
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warn)


def _always(*_: object, **__: object) -> bool:
    return True
