"""Patches of torch that tell the clock what a training loop does; all are taken back together."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import distributed, nn
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader

from vivace.job import Batch
from vivace.profiling.record import gpus
from vivace.profiling.record.clock import Clock
from vivace.profiling.record.guard import Guard, hide_frames, reading
from vivace.profiling.record.sites import calling_site
from vivace.tensors import trees
from vivace.torch_internals.loaders import END_WORKERS, LoaderIterator, WorkersIterator, has_ended

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "reduce",
    "reduce_scatter_tensor",
)
BACKWARDS_ALONE = 8  # without an update: is there an optimizer at all?


class Patches:
    """Attributes that were replaced, and what they were. What stands in their place cannot fail: `guard`."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: object, name: str, make: Callable[[Any], Any]) -> None:
        """Put ``make(original)`` in place of an attribute that exists; one that is missing stays missing.

        It is made anew for each call: what lasts longer is no variable of `make`. Where somebody else has
        replaced it since, theirs stays, and what it may call of ours does nothing any more.
        """
        if not hasattr(owner, name):
            return
        own = name in vars(owner)
        original, ended = getattr(owner, name), list[bool]()

        def made(theirs: object) -> Any:
            return theirs if ended else make(theirs)

        standing: Any = functools.wraps(original)(self.guard.around(original, made))
        of_torch = str(getattr(owner, "__module__", "torch")).startswith("torch")  # pickled by its name
        if isinstance(owner, type) and not of_torch:
            standing = _InClass(standing, original)

        def undo() -> None:
            ended.append(True)
            if vars(owner).get(name) is standing:
                setattr(owner, name, original) if own else delattr(owner, name)

        setattr(owner, name, standing)
        self._undo.append(undo)

    def hook(self, handle: Any) -> None:
        """Silence torch's hook `handle` too.

        It is not removed, as torch may be going through the hooks: it becomes one that does nothing.
        """
        self._undo.append(functools.partial(handle.hooks_dict_ref().__setitem__, handle.id, lambda *_: None))

    def hide(self) -> None:
        """Where the script ends by an error, its traceback is the one that it has alone."""
        before = sys.excepthook

        def shown(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            with contextlib.suppress(Exception):
                hide_frames(error)
                trace = error.__traceback__
            before(kind, error, trace)

        def undo() -> None:
            if sys.excepthook is shown:  # else the script has put its own into this place
                sys.excepthook = before

        sys.excepthook = shown
        self._undo.append(undo)

    def restore(self) -> None:
        """Put everything back, last change first."""
        while self._undo:
            self._undo.pop()()


class _InClass:
    """Stands in a class for a function. Who pickles the class by what it holds, as cloudpickle does with
    those of a script, writes that function.
    """

    def __init__(self, standing: Callable[..., Any], original: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original)
        self._standing, self._original = standing, original

    def __get__(self, owner: object, kind: type | None = None) -> Any:
        return self if owner is None else types.MethodType(self._standing, owner)

    def __call__(self, *arguments: object, **keywords: object) -> Any:
        return self._standing(*arguments, **keywords)

    def __reduce__(self) -> Any:
        return copy.copy, (self._original,)


class LoopHooks:
    """Fetch, place, backward, update and collectives, for as long as the profile lasts.

    What another thread than the one that trains does is none of the loop's.
    """

    def __init__(self, clock: Clock, guard: Guard) -> None:
        self.clock, self.guard = clock, guard
        self.optimizers: dict[int, torch.optim.Optimizer] = {}
        self.by_hand: list[torch.Tensor] = []  # weights that no optimizer updates
        self.replays = 0
        self.loader: Any = None  # that feeds training: a backward pass or an update follows its batch
        self.loaders: list[Any] = []  # all those that feed it together, in pairs
        self._loader_of: weakref.WeakKeyDictionary[object, Any] = weakref.WeakKeyDictionary()  # by iterator
        self._gave: dict[int, tuple[Any, int]] = {}  # loaders since then, the last one last, and how often
        self.annotate = False
        self.batch: Any = None
        self.fetch_cpu_seconds = 0.0
        self.synchronize = False  # let the clock see the device's time, not the host's
        self.examine_losses = False
        self.evaluated_at = ""  # the line that puts a module into evaluation mode
        self.on_backward: Callable[[Any], None] = lambda losses: None  # after each pass
        self.on_collective: Callable[[], None] = lambda: None  # before each
        self.retained_at = ""  # the line of a backward pass that keeps its graph
        self._patches = Patches(guard)
        self.is_over = False
        self._begun: int | None = None  # the iterator of a training loader whose first batch has not come
        self._fetching = 0
        self._thread: int | None = None  # the one that trains, known from the first backward pass on
        self._backwards = 0  # calls of Tensor.backward that have not returned
        self._looked = False
        self._ranges: list[Any] = []

    def install(self) -> None:
        """Patch torch's functions that mark the phases of a step."""
        patches = self._patches
        patches.hide()
        patches.replace(LoaderIterator, "__next__", self._next)
        patches.replace(DataLoader, "__iter__", self._iter)
        patches.replace(WorkersIterator, END_WORKERS, self._ending_workers)
        patches.replace(torch.autograd, "backward", self._backward)
        patches.replace(torch.optim.Optimizer, "zero_grad", self._zeroing)
        patches.replace(torch.nn.Module, "eval", self._evaluating)
        before = optimizers.register_optimizer_step_pre_hook(self.guard.looking(self._before_update))
        patches.hook(before)
        after = optimizers.register_optimizer_step_post_hook(self.guard.looking(self._after_update))
        patches.hook(after)
        if torch.cuda.is_available():
            for name in ("to", "cuda"):
                patches.replace(torch.Tensor, name, self._placing)
        if distributed.is_available():
            for name in COLLECTIVES:
                patches.replace(distributed, name, self._communicating)

    def restore(self) -> None:
        """Leave torch as it was."""
        self._patches.restore()

    def forget(self) -> None:
        """Let go of what is the loop's: the script may want its memory back."""
        self.is_over = True
        self.batch = self.loader = None
        self.by_hand, self.loaders = [], []
        self._loader_of.clear()
        self._gave.clear()
        self.optimizers.clear()

    @contextlib.contextmanager
    def fetching(self) -> Iterator[None]:
        """A batch is fetched inside; the outermost of nested fetches counts."""
        self._fetching += 1
        begin = 0.0
        if self._fetching == 1:
            self._wait()
            self.clock.fetch(training=torch.is_grad_enabled())
            self._push("data")
            begin = time.thread_time()
        try:
            yield
        finally:
            self._fetching -= 1
            if not self._fetching:
                self.fetch_cpu_seconds += time.thread_time() - begin
                self._pop()

    @contextlib.contextmanager
    def _starting(self, counts: bool) -> Iterator[None]:
        """If it `counts`, the time inside is what it takes a loader to begin a pass, or to end one."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            if counts:
                self.clock.step.starting_seconds += time.perf_counter() - begin

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the time inside to a phase, and name it in the trace."""
        self._push(name)
        try:
            yield
        finally:
            self._pop()

    def fetched(self, batch: Batch, source: object = None) -> None:
        """Note that a loader's iterator, the `source`, has delivered a batch."""
        if self.is_over:
            return
        self.batch = batch
        elements = _quietly(lambda: sum(tensor.numel() for tensor in trees.tensors(batch)))
        self.clock.fetched(_quietly(lambda: trees.batch_size(batch)), elements, id(source))

    def replayed(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that a recorded step has run again: nothing of it passed the hooks."""
        self._wait()
        self._is_fed()
        self.replays += 1
        self.clock.replayed(id(optimizer))

    @property
    def _is_elsewhere(self) -> bool:
        """Does another thread than the one that trains call, such as one that fetches ahead of it?"""
        if self._thread in (None, threading.get_ident()):
            return False
        return self._thread in [thread.ident for thread in threading.enumerate()]

    @property
    def _updates_elsewhere(self) -> bool:
        """The same of an update; one inside of a backward pass is the loop's, whose thread is torch's own."""
        return self._is_elsewhere and self.clock.inside not in ("backward", "update")

    def _wait(self) -> None:
        if self.synchronize:
            gpus.wait()

    def _push(self, name: str) -> None:
        self._wait()
        self.clock.push(name)
        if self.annotate:
            self._ranges.append(named_range(f"vivace:{name}"))

    def _pop(self) -> None:
        if self._ranges:
            self._ranges.pop().__exit__(None, None, None)
        self._wait()
        self.clock.pop()

    def _next(self, original: Callable[..., Any]) -> Any:
        def following(iterator: object) -> Any:
            if self._is_elsewhere:
                return original(iterator)
            first, self._begun = id(iterator) == self._begun, None
            with self._starting(first), self.fetching():
                batch = original(iterator)
            self._note_giver(self._loader_of.get(iterator))
            if not self._fetching:
                self.fetched(batch, iterator)
            return batch

        return following

    def _note_giver(self, loader: object) -> None:
        """A batch has come from this loader."""
        if loader is not None and not self.is_over:
            _, times = self._gave.pop(id(loader), (loader, 0))
            self._gave[id(loader)] = loader, times + 1

    def _is_fed(self) -> None:
        """What the last loader gave is trained on; those that gave as many batches feed it together."""
        if self._gave:
            given, times = zip(*self._gave.values(), strict=True)
            together = len(set(times)) == 1 and not self.clock.step.validates
            self.loader, self.loaders = given[-1], list(given if together else given[-1:])
            self._gave.clear()

    def _iter(self, original: Callable[..., Any]) -> Any:
        def begin(loader: Iterable[Batch]) -> Any:
            if self._is_elsewhere:
                return original(loader)
            if self._fetching:
                self.clock.step.interrupted = True
                return self._iterator(original, loader)
            trains = torch.is_grad_enabled()
            with self._starting(trains), self.fetching():
                self.clock.step.interrupted = True  # workers start: not a step like the others
                iterator = self._iterator(original, loader)
            self._begun = id(iterator) if trains else None
            return iterator

        return begin

    def _iterator(self, original: Callable[..., Any], loader: Iterable[Batch]) -> Any:
        iterator = original(loader)
        with contextlib.suppress(TypeError):  # one of a kind of its own, that nothing can point to weakly
            self._loader_of[iterator] = loader
        return iterator

    def _ending_workers(self, original: Callable[..., Any]) -> Any:
        def end(iterator: object) -> Any:
            if has_ended(iterator) or self._is_elsewhere:
                return original(iterator)
            self.clock.step.interrupted = True
            with self._starting(True), self.phase("data"):
                return original(iterator)

        return end

    def _communicating(self, original: Callable[..., Any]) -> Any:
        def call(*arguments: object, **keywords: object) -> Any:
            self.on_collective()
            with self.phase("communication"):
                return original(*arguments, **keywords)

        return call

    def _backward(self, original: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def backward(
            tensors: torch.Tensor | Iterable[torch.Tensor],
            grad_tensors: object = None,
            retain_graph: bool | None = None,
            create_graph: bool = False,
            **rest: object,
        ) -> Any:
            if self._is_elsewhere:
                return original(tensors, grad_tensors, retain_graph, create_graph, **rest)
            self._thread = threading.get_ident()
            if isinstance(tensors, Iterator):  # which can be gone through once
                tensors = tuple(tensors)
            if self.examine_losses:
                finite = all(bool(torch.isfinite(t.detach()).all()) for t in trees.tensors(tensors))
                self.clock.step.not_finite |= not finite
            retains = bool(retain_graph) and not create_graph
            if retains and not self.retained_at:
                self.retained_at = calling_site()
            try:
                with self.phase("backward"):
                    return original(tensors, grad_tensors, retain_graph, create_graph, **rest)
            finally:
                self._is_fed()
                self.on_backward(tensors)
                self._look_for_an_optimizer()
                self.clock.went_backward(retains=retains)

        return backward

    def _look_for_an_optimizer(self) -> None:
        """Once, where several backward passes came without an update."""
        if self.clock.unanswered == BACKWARDS_ALONE and not self._looked:
            self._looked = True
            self.by_hand = weights_without_optimizer()
            if self.by_hand:
                self.clock.by_hand = True
                self._patches.replace(torch.nn.Module, "zero_grad", self._clearing)
                self._patches.replace(torch.Tensor, "backward", self._returning)

    def _evaluating(self, original: Callable[..., Any]) -> Any:
        def evaluate(module: nn.Module) -> Any:
            self.evaluated_at = self.evaluated_at or calling_site()
            self.clock.evaluates()
            return original(module)

        return evaluate

    def _returning(self, original: Callable[..., Any]) -> Any:
        """The step ends after the outermost call: torch calls this again where something counts operations,
        and what counts them cannot be removed inside of such a call.
        """

        def backward(*arguments: object, **keywords: object) -> Any:
            self._backwards += 1
            try:
                return original(*arguments, **keywords)
            finally:
                self._backwards -= 1
                if not self._backwards:
                    self.clock.returned()

        return backward

    def _clearing(self, original: Callable[..., Any]) -> Any:
        def clear(*arguments: object, **keywords: object) -> Any:
            self.clock.cleared()
            return original(*arguments, **keywords)

        return clear

    def _zeroing(self, original: Callable[..., Any]) -> Any:
        def zero(*arguments: object, **keywords: object) -> Any:
            self.clock.push("update", decides=False)  # people do this anywhere in the step
            try:
                return original(*arguments, **keywords)
            finally:
                self.clock.pop()

        return zero

    def _placing(self, original: Callable[..., Any]) -> Any:
        def move(tensor: torch.Tensor, *arguments: object, **keywords: object) -> Any:
            if tensor.is_cuda or self.clock.inside is not None:
                return original(tensor, *arguments, **keywords)
            self._push("place")
            try:
                return original(tensor, *arguments, **keywords)
            finally:
                self._pop()

        return move

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._updates_elsewhere:
            return
        self.optimizers[id(optimizer)] = optimizer
        self._push("update")

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._updates_elsewhere:
            return
        self._pop()
        self._is_fed()
        self.clock.updated(id(optimizer))


def weights_without_optimizer() -> list[torch.Tensor]:
    """The leaves that have a gradient, where this process holds no optimizer; else nothing."""
    gc.collect()
    found: list[torch.Tensor] = []
    for thing in gc.get_objects():
        kind = type(thing)
        if issubclass(kind, torch.optim.Optimizer):
            return []
        if issubclass(kind, torch.Tensor) and thing.is_leaf and thing.grad is not None:
            found.append(thing)
    return found


def _quietly(count: Callable[[], int]) -> int:
    """0 where what a loader gave cannot be counted."""
    return reading(count, 0, lambda error: None)


def named_range(name: str) -> Any:
    """A range of the trace that has begun; ``__exit__`` ends it."""
    found: Any = torch.autograd.profiler.record_function(name)
    found.__enter__()
    return found
