"""Decisive experiments: a copy of the model runs the last batch with and without a setting.

The person's model, optimizer and random streams are not touched; a copy costs the memory of one more step.
"""

from __future__ import annotations

import contextlib
import copy
import random
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from vivace.profile.record.hooks import Patches
from vivace.profile.record.waits import calling_site

PAIRS, BLOCK_SECONDS, BUDGET_SECONDS = 7, 0.08, 4.0


class CallCatcher:
    """Keeps the arguments of the last call of each outermost module, and the autocast around it."""

    def __init__(self, roots: dict[str, nn.Module]) -> None:
        self.roots = roots
        self.calls: dict[str, tuple[Any, Any]] = {}
        self.autocast: dict[str, tuple[bool, torch.dtype]] = {}
        self._handles = [
            module.register_forward_pre_hook(self._catch(name), with_kwargs=True)
            for name, module in roots.items()
        ]

    def restore(self) -> None:
        """Stop keeping."""
        for handle in self._handles:
            handle.remove()

    def _catch(self, name: str) -> Any:
        def hook(module: nn.Module, arguments: Any, keywords: Any) -> None:
            device = next((p.device.type for p in module.parameters()), "cpu")
            if torch.is_grad_enabled():
                self.calls[name] = (arguments, keywords)
                self.autocast[name] = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))

        return hook


def watch_settings(patches: Patches, document: dict[str, Any]) -> list[Callable[[], Any]]:
    """Note which settings the person's code asks for: torch.compile, channels-last, threads.

    Returns weak references to what torch.compile returned: a result that nobody kept cannot run.
    """
    asked: dict[str, str] = document.setdefault("asked", {})
    compiled: list[Callable[[], Any]] = []

    def noting(name: str, when: Callable[..., bool] = lambda *_, **__: True) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            def call(*arguments: Any, **keywords: Any) -> Any:
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

    def channels_last(*_: Any, memory_format: Any = None, **__: Any) -> bool:
        return memory_format is torch.channels_last

    patches.replace(torch, "compile", noting("compile"))
    patches.replace(nn.Module, "compile", noting("compile"))
    patches.replace(nn.Module, "to", noting("channels_last", channels_last))
    patches.replace(torch, "set_num_threads", noting("threads"))
    patches.replace(nn.DataParallel, "__init__", noting("data_parallel"))
    return compiled


def run(recorder: Any, document: dict[str, Any]) -> None:
    """The experiments that what was seen calls for; results stand under ``experiments``.

    Each holds speed ratios of neighbouring blocks: how many times faster without the setting.
    """
    done: dict[str, Any] = document.setdefault("experiments", {})
    catcher: CallCatcher | None = getattr(recorder, "catcher", None)
    if catcher is None or not catcher.calls:
        return
    name = max(catcher.calls, key=lambda n: sum(p.numel() for p in catcher.roots[n].parameters()))
    module, call, autocast = catcher.roots[name], catcher.calls[name], catcher.autocast[name]
    device = next((p.device.type for p in module.parameters()), "cpu")
    contexts = _contexts(device, autocast[0], document)
    changes = _changes(module, document)
    if not contexts and not changes:
        return
    with _same_random_streams():
        shadow = _Shadow(module, call, (device, *autocast))
        for setting, context in contexts.items():
            done[setting] = compare(shadow.runner(), shadow.runner(context))
        for setting, change in changes.items():
            other = _Shadow(module, call, (device, *autocast))
            change(other)
            done[setting] = compare(shadow.runner(), other.runner())


def _contexts(device: str, autocast: bool, document: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Settings that a context turns off, for those that are on."""
    found: dict[str, Callable[[], Any]] = {}
    threads, cores = torch.get_num_threads(), document["flags"]["cores"]
    if autocast:
        found["autocast"] = lambda: torch.autocast(device, enabled=False)
    if device == "cpu" and threads != cores:
        found["threads"] = lambda: _threads(cores)
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


def compare(as_it_is: Callable[[], None], without: Callable[[], None]) -> dict[str, Any]:
    """Alternate blocks of both; seconds a run as it is, and how many times faster the other was."""
    for _ in range(2):
        seconds = max(_block(as_it_is, 1), 1e-5)
        _block(without, 1)
    runs = max(1, round(BLOCK_SECONDS / seconds))
    deadline = time.perf_counter() + BUDGET_SECONDS
    before: list[float] = []
    after: list[float] = []
    while len(before) < PAIRS and (time.perf_counter() < deadline or len(before) < 3):
        before.append(_block(as_it_is, runs))
        after.append(_block(without, runs))
    return {"ratios": [a / b for a, b in zip(before, after, strict=True)], "seconds": min(before)}


def _block(function: Callable[[], None], runs: int) -> float:
    """Mean seconds of one run."""
    _wait()
    begin = time.perf_counter()
    for _ in range(runs):
        function()
    _wait()
    return (time.perf_counter() - begin) / runs


def _wait() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


class _Shadow:
    """A copy of a module with the arguments of one call, ready to run forward and backward."""

    def __init__(
        self, module: nn.Module, call: tuple[Any, Any], autocast: tuple[str, bool, torch.dtype]
    ) -> None:
        self.module = copy.deepcopy(module)
        self.arguments, self.keywords = (_mapped(part, torch.Tensor.detach) for part in call)
        self.autocast = autocast

    def convert(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a function to every weight, buffer and argument."""
        self.module._apply(function)  # type: ignore[no-untyped-call]
        self.arguments, self.keywords = _mapped(self.arguments, function), _mapped(self.keywords, function)

    def runner(self, context: Callable[[], Any] = contextlib.nullcontext) -> Callable[[], None]:
        """Forward and backward once, inside a context."""

        def step() -> None:
            device, enabled, dtype = self.autocast
            with torch.autocast(device, dtype=dtype, enabled=enabled), context():
                result = self.module(*self.arguments, **self.keywords)
                losses = [t.float().mean() for t in _differentiable(result)]
            if losses:
                torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
            self.module.zero_grad(set_to_none=True)

        return step


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _nondeterministic() -> Iterator[None]:
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warn)


@contextlib.contextmanager
def _same_random_streams() -> Iterator[None]:
    state = random.getstate()
    numpy_random = None
    with contextlib.suppress(ImportError):
        import numpy

        numpy_random = numpy.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(state)
        if numpy_random is not None:
            numpy.random.set_state(numpy_random)


def _mapped(tree: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {key: _mapped(value, function) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields"):
        return type(tree)(_mapped(item, function) for item in tree)
    return tree


def _differentiable(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        if tree.requires_grad and tree.is_floating_point():
            yield tree
    elif hasattr(tree, "values"):
        for value in tree.values():
            yield from _differentiable(value)
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _differentiable(item)
