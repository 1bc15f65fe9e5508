"""The loop that a script runs: which module it trains, and where its steps end. Nothing may fail into it.

For the first steps all modules' calls are looked at; afterwards one class's, and what torch calls once a
step.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader

from vivace.job import Batch
from vivace.live.ending import tell
from vivace.live.errand import Errand
from vivace.live.refusals import Seen, why_left_alone
from vivace.profiling.record.guard import Guard, described
from vivace.profiling.record.hooks import Patches
from vivace.torch_internals.tensors import in_backward

if TYPE_CHECKING:
    from vivace.live.conductor import Conductor

LOOKED_AT = 3  # steps, before it is decided which module is trained


class Loop:
    """Call `install` before training begins. The `conductor` comes when the loop is known to be one that can
    be led; until then, and where it cannot, the script is only looked at.

    Args:
        errand: where to keep what is found.
        tell: what to do with it at the end.
        total_steps: how long the loop is going to be, where that is known.
    """

    def __init__(
        self, errand: Errand, tell: Callable[[Loop], object] = tell, total_steps: int | None = None
    ) -> None:
        self.errand, self.tell, self.total_steps = errand, tell, total_steps
        self.guard = Guard(self._give_up)
        self.problems: list[str] = []
        self.left_alone = ""  # why
        self.num_steps = 0
        self.own_seconds = 0.0  # that the script waited for us
        self.began = time.perf_counter()
        self.conductor: Conductor | None = None
        self.interrupted = False  # since the last step: an evaluation, or a new pass over the data
        self.seen = Seen()
        self._patches = Patches(self.guard)
        self._looking = Patches(self.guard)
        self._pid, self._thread = os.getpid(), threading.get_ident()
        self._depth = 0
        self._leading = False  # are we at work?
        self._finished = False

    def install(self) -> None:
        """Patch torch and begin to look. Where that fails, torch is left as it was, and the error raised."""
        patches = self._patches
        try:
            self._looking.replace(nn.Module, "__call__", self._any_call)
            patches.replace(torch.autograd, "backward", self._backward)
            patches.replace(torch.autograd, "grad", self._differentiating)
            patches.replace(torch, "compile", self._compiling)
            patches.replace(torch.amp.GradScaler, "scale", self._scaling)
            patches.replace(DataLoader, "__iter__", self._new_pass)
            before = optimizers.register_optimizer_step_pre_hook(self.guard.looking(self._before_update))
            patches.hook(before)
            after = optimizers.register_optimizer_step_post_hook(self.guard.looking(self._updated))
            patches.hook(after)
        except Exception:
            self._restore()
            raise
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_in_child(weakref.ref(self)))  # which nothing takes back
        atexit.register(self.finish)

    def finish(self) -> None:
        """Say what came of it and restore torch."""
        if self._finished or os.getpid() != self._pid:
            return
        self._finished = True
        atexit.unregister(self.finish)
        try:
            if self.conductor is not None:
                self.conductor.close()
            self._restore()
            self._tell()
        except Exception as error:  # at the end of a person's script
            print(f"vivace: what came of this run cannot be told: {error}", file=sys.stderr)

    def _tell(self) -> None:
        if not (self.num_steps or self.errand.is_for_this_process):
            return  # a loader worker, or a launcher
        self.tell(self)

    def leave_alone(self, reason: str) -> None:
        """Let the script run on as it is."""
        self.left_alone = self.left_alone or reason
        self.guard.off = True
        self._restore()

    def _give_up(self, error: Exception) -> None:
        """A fault of ours: the script goes on as it is."""
        self.problems.append(described(error))
        if self.conductor is not None:
            self.conductor.fail(error)
        self._restore()

    def _restore(self) -> None:
        self._looking.restore()
        self._patches.restore()

    def _forked(self) -> None:
        """A child process trains, if it does, as it is."""
        self.guard.off = True
        self._finished = True

    def _any_call(self, original: Callable[..., Any]) -> Any:
        """The outermost call of a module that has weights and is in training is that of a root."""

        def call(module: nn.Module, *arguments: object, **keywords: object) -> Any:
            if threading.get_ident() != self._thread:
                return original(module, *arguments, **keywords)
            if not self._depth and torch.is_grad_enabled() and module.training:
                self.seen.called(module)
            self._depth += 1
            try:
                return original(module, *arguments, **keywords)
            finally:
                self._depth -= 1

        return call

    def _backward(self, original: Callable[..., Any]) -> Any:
        def backward(*arguments: object, **keywords: object) -> Any:
            if keywords.get("create_graph") or (len(arguments) > 3 and arguments[3]):
                self.seen.differentiates_twice = True
            if not in_backward():  # else checkpointing asks, inside of a pass
                self.seen.backwards += 1
            return original(*arguments, **keywords)

        return backward

    def _differentiating(self, original: Callable[..., Any]) -> Any:
        def grad(*arguments: object, **keywords: object) -> Any:
            if keywords.get("create_graph") or (len(arguments) > 4 and arguments[4]):
                self.seen.differentiates_twice = True
            return original(*arguments, **keywords)

        return grad

    def _compiling(self, original: Callable[..., Any]) -> Any:
        def compile(model: object = None, *arguments: object, **keywords: object) -> Any:
            if isinstance(model, nn.Module):  # calls must not be looked at: the looking would be compiled
                self.leave_alone("its model is compiled by torch.compile")
            return original(model, *arguments, **keywords)

        return compile

    def _scaling(self, original: Callable[..., Any]) -> Any:
        def scale(scaler: torch.amp.GradScaler, outputs: object) -> Any:
            self.seen.scales_loss |= bool(scaler.is_enabled())
            return original(scaler, outputs)

        return scale

    def _new_pass(self, original: Callable[..., Any]) -> Any:
        def begin(loader: Iterable[Batch]) -> Any:
            self.interrupted = True
            return original(loader)

        return begin

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if not self._leading:  # what is tried on copies steps as well
            self.seen.optimizers[id(optimizer)] = optimizer

    def _updated(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """The optimizer has stepped: the only place at which the loop is led."""
        if self._leading or threading.get_ident() != self._thread:
            return
        begin = time.perf_counter()
        with self.at_work():
            if self.conductor is not None:
                self.conductor.updated(optimizer)
            else:
                self._look(optimizer)
        self.own_seconds += time.perf_counter() - begin

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Optimizers that step inside are ours."""
        before, self._leading = self._leading, True
        try:
            yield
        finally:
            self._leading = before

    def _look(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.seen.ends_step(optimizer):
            return
        self.num_steps += 1
        if self.num_steps < LOOKED_AT:
            self.seen.next_step()
            return
        self._looking.restore()
        reason = why_left_alone(self.seen)
        if reason:
            self.leave_alone(reason)
            return
        # At its end Python forgets a Ctrl-C where modules are still imported: the page's are read now.
        from vivace.live import page as page
        from vivace.live.conductor import Conductor

        self.conductor = Conductor(self, self.seen.root, optimizer)
        self._patches.replace(type(self.seen.root), "__call__", self._root_call)

    def _root_call(self, original: Callable[..., Any]) -> Any:
        def call(module: nn.Module, *arguments: object, **keywords: object) -> Any:
            conductor = self.conductor
            other = module is not self.seen.root or conductor is None or self._depth
            if other or threading.get_ident() != self._thread:
                return original(module, *arguments, **keywords)
            assert conductor is not None
            self._depth += 1
            try:
                return conductor.called(original, module, arguments, keywords)
            finally:
                self._depth -= 1

        return call


def _in_child(found: weakref.ref[Loop]) -> Callable[[], None]:
    def forked() -> None:
        loop = found()
        if loop is not None:
            loop._forked()

    return forked
