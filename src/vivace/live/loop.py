"""The loop that a script runs: which module it trains, and where its steps end. Nothing may fail into it.

For the first steps all modules' calls are looked at; afterwards one class's, and what torch calls once a
step.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import optimizer as optimizers
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from vivace import words
from vivace.job import Batch
from vivace.live.ending import end_at_once
from vivace.live.errand import Errand
from vivace.live.length import Length
from vivace.live.own_update import OwnUpdate, OwnUpdates
from vivace.live.refusals import Seen, fault_of, is_training, several, why_left_alone, why_only_the_rest
from vivace.live.spending import Clock, Spending, page_faults
from vivace.profiling.record.guard import Guard, described
from vivace.profiling.record.hooks import Patches
from vivace.profiling.record.signals import end_as_interrupted, raised_by_handler
from vivace.tensors.loaders import that_iterate_themselves
from vivace.tensors.outside import of_library
from vivace.torch_internals.tensors import in_backward

if TYPE_CHECKING:
    from vivace.live.conductor import Conductor
    from vivace.live.ranks import Ranks

LOOKED_AT = 3  # steps before it is decided which module is trained
WARM_STEPS = 8
RECORDED = "it records its steps in a CUDA graph"
HOOKING = (
    "register_forward_pre_hook",
    "register_forward_hook",
    "register_full_backward_pre_hook",
    "register_full_backward_hook",
)
SMALLEST_STEP_SECONDS = 2e-4  # a shorter step is slowed visibly by being watched


class Loop:
    """Call `install` before training begins.

    The script is looked at for its first steps. Then, and that is all for a short one, only the time of its
    steps is noted, until a search is worth its time; then comes the `conductor`. Whatever ends the matter
    removes every hook.

    Args:
        errand: where to keep what is found.
        clock: by which time is told.
        tell: what to do at the end.
        total_steps: how long the loop is going to be, where that is known.
    """

    def __init__(
        self,
        errand: Errand,
        clock: Clock | None = None,
        *,
        tell: Callable[[Loop], object],
        total_steps: int | None = None,
    ) -> None:
        self.errand, self.tell, self.total_steps = errand, tell, total_steps
        self.clock = clock or Clock()
        self.spending = Spending(
            self.clock,
            free_seconds=errand.search_seconds,
            coming=self._seconds_to_come,
            waited=errand.launch_seconds,
        )
        self.length = Length()
        self.guard = Guard(self._give_up)
        self.problems: list[str] = []
        self.left_alone = ""  # why
        self.rest = ""  # why nothing acts on the model's calls, where only the rest is led
        self.num_steps = 0
        self.of_threads = False  # does an optimizer step in a thread that the script has started?
        self.conductor: Conductor | None = None
        self.ranks: Ranks | None = None  # that train one model together, under one decision
        self.interrupted = False  # since the last step: an evaluation, or a new pass over the data
        self.seen = Seen()
        self.step_seconds: deque[float] = deque(maxlen=21)  # of the newest steps
        self.is_in_hook = False
        self._of_updates: tuple[Any, ...] = ()
        self._looking, self._gradients, self._loaders = (Patches(self.guard) for _ in range(3))
        self._waiting, self._leading = (Patches(self.guard) for _ in range(2))
        self._own_updates = OwnUpdates(self)
        self._pid, self._thread = os.getpid(), threading.get_ident()
        self._depth = 0
        self._at_work = False
        self._finished = False
        self._looked, self._num_looked = False, 0
        self.timed = 0.0, 0  # all seconds of so many steps that were timed before a search
        self._backwards, self.calls = 0, 1  # in a step of late: several where it accumulates gradients
        self._last = 0.0  # when the newest step ended
        self._pass = 0, 0  # steps when a pass over the data began, and its batches
        self._faults = 0, 0  # steps when it was looked at, and page faults of the process until then
        self.page_faults = 0.0  # of a step of the script's own: how often the system gave it 4 KiB of memory
        self.end: Callable[[], object] = end_at_once  # a script that is run for its plan alone

    def install(self) -> None:
        """Patch torch and begin to look. Where that fails, torch is left as it was, and the error raised."""
        waiting = self._waiting
        try:
            waiting.hide()
            self._own_updates.install()
            self._look_at_calls()
            waiting.replace(torch, "compile", self._compiling)
            waiting.replace(DataLoader, "__iter__", self._new_pass)
            before = optimizers.register_optimizer_step_pre_hook(self.guard.answering(self._before_update))
            after = optimizers.register_optimizer_step_post_hook(self.guard.looking(self._updated))
            self._of_updates = before, after
            for handle in self._of_updates:
                waiting.hook(handle)
        except Exception:
            self._restore()
            raise
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_in_child(weakref.ref(self)))  # which nothing takes back
        atexit.register(self.finish)

    def _look_at_calls(self) -> None:
        self._looking.replace(nn.Module, "__call__", self._any_call)
        self._watch_gradients()

    def _watch_gradients(self) -> None:
        self._gradients.restore()
        self._gradients.replace(torch.autograd, "backward", self._backward)
        self._gradients.replace(torch.autograd, "grad", self._differentiating)
        self._gradients.replace(torch.amp.GradScaler, "scale", self._scaling)

    def finish(self) -> None:
        """Say what came of it and restore torch."""
        if self._finished or os.getpid() != self._pid:
            return
        self._finished = True
        atexit.unregister(self.finish)
        try:
            if self.ranks is not None and self.ranks.leads:
                self.left_alone = self.left_alone or self.ranks.lost
            if self.conductor is not None:
                self.conductor.close()
            self._restore()
            for handle in self._of_updates if not self.is_in_hook else ():
                handle.remove()
            self._tell()
        except Exception as error:  # at the end of a person's script
            print(f"vivace: what came of this run cannot be told: {error}", file=sys.stderr)
        end_as_interrupted()

    def _tell(self) -> None:
        if self.num_steps or (self.errand.is_for_this_process and not self.errand.is_told):
            self.tell(self)  # else it is a loader's worker, or a launcher

    def say(self, line: str) -> None:
        """Tell the person what a script waits for, where anything is told."""
        if self.errand.search_seconds is None and not self.errand.quiet:
            print(f"vivace: {line}", file=sys.stderr, flush=True)

    def leave_alone(self, reason: str) -> None:
        """Let the script run on as it is."""
        self.left_alone = self.left_alone or reason
        self.step_aside()

    def step_aside(self) -> None:
        """There is nothing more to do: remove every hook."""
        self.guard.off = True
        self._restore()
        if self.errand.search_seconds is not None:
            self.finish()
            self.end()

    def only_the_rest(self, optimizer: torch.optim.Optimizer, reason: str) -> None:
        """Nothing acts on the model's calls any more; begin anew with what else there is."""
        self.rest = reason
        self._leading.restore()
        self._begin(optimizer)

    def _give_up(self, error: Exception) -> None:
        """A fault of ours: the script goes on as it is."""
        self.problems.append(described(error))
        self.left_alone = self.left_alone or fault_of(error)
        try:
            if self.conductor is not None:
                self.conductor.fail()
        finally:  # of several processes the others go on until the first one ends the search
            end = self.step_aside if self.ranks is None or self.ranks.leads else self._restore
            end()

    def _restore(self) -> None:
        for patches in (self._leading, self._looking, self._gradients, self._loaders, self._waiting):
            patches.restore()
        self._own_updates.restore()
        if self.conductor is not None:
            self.conductor.let_go()
        if self.ranks is not None:
            self.ranks.leave(self.left_alone)

    def _forked(self) -> None:
        """A child process trains, if it does, as it is."""
        self.guard.off = True
        self._finished = True
        if self.conductor is not None:
            self.conductor.forked()

    def _any_call(self, original: Callable[..., Any]) -> Any:
        """The outermost call of a module that has weights and is in training is that of a root."""

        def call(module: nn.Module, *arguments: object, **keywords: object) -> Any:
            if threading.get_ident() != self._thread:
                return original(module, *arguments, **keywords)
            if torch.is_grad_enabled() and is_training(module):
                self.seen.entered(module)
                if not self._depth and not in_backward():  # where checkpointing calls parts again
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
            if threading.get_ident() == self._thread and not in_backward():  # where checkpointing asks
                self._backwards += 1
                if not self._looked:
                    self.seen.backwards += 1
                    self.seen.methods.backward()
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
            if model is not None and not self._at_work and not keywords.get("disable"):
                of_model = isinstance(getattr(model, "__self__", model), nn.Module)
                self.seen.compiles = "its model is" if of_model else "functions of its own are"
                self._looking.restore()  # else the looking would be compiled, and then the same without it
                self._gradients.restore()
                if self.conductor is not None and not self.rest:
                    self.conductor.close()
                    self.only_the_rest(self.conductor.optimizer, why_only_the_rest(self.seen))
            return original(model, *arguments, **keywords)

        return compile

    def _scaling(self, original: Callable[..., Any]) -> Any:
        def scale(scaler: torch.amp.GradScaler, outputs: object) -> Any:
            if scaler.is_enabled():
                self.seen.scalers[id(scaler)] = scaler
            return original(scaler, outputs)

        return scale

    def _new_pass(self, original: Callable[..., Any]) -> Any:
        def begin(loader: DataLoader[Batch]) -> Any:
            self.interrupted = True
            if torch.is_grad_enabled() and not isinstance(loader.dataset, IterableDataset):
                with contextlib.suppress(Exception):  # a sampler without a length
                    self._pass = self.num_steps, self._batches_of(loader)
            return original(loader)

        return begin

    def _batches_of(self, loader: DataLoader[Batch]) -> int:
        """Of a pass that begins. A sampler of the script's own is not asked, as it may draw for its answer:
        then as many as the pass before had. Of several that begin at one step the last counts.
        """
        outer = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        inner = outer.sampler if type(outer) is BatchSampler else outer
        modules = {type(loader).__len__.__module__, type(outer).__module__, type(inner).__module__}
        if all(map(of_library, modules)):
            return len(loader)
        return (self.num_steps - self._pass[0]) * self.calls or self._pass[1]  # where one begins another's

    def _evaluating(self, original: Callable[..., Any]) -> Any:
        def evaluate(module: nn.Module) -> Any:
            root = self.conductor.root if self.conductor is not None else None
            if self.conductor is not None and root in (module, getattr(module, "module", None)):
                self.conductor.pause()
            elif (self.rest or self.seen.method != "__call__") and not self._depth:
                self.interrupted = True  # else its calls tell, and parts may be frozen so
            return original(module)

        return evaluate

    def _hooking(self, original: Callable[..., Any]) -> Any:
        def register(module: nn.Module, *arguments: object, **keywords: object) -> Any:
            if self.conductor is not None and not self._at_work:
                self.conductor.hooked = True
            return original(module, *arguments, **keywords)

        return register

    def _before_update(
        self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[Any, ...] | None:
        if threading.get_ident() != self._thread or self._at_work:
            return None  # what is tried on copies steps as well
        answer = None
        self.seen.optimizers[id(optimizer)] = optimizer
        if self.conductor is not None and not self._is_recorded(optimizer) and self.rest:
            begin = self.clock.wall()
            answer = self.conductor.updating(optimizer, arguments, keywords)
            self.spending.waited += self.clock.wall() - begin
        return answer

    def stepped(self, optimizer: OwnUpdate) -> None:
        """A step is over of which no optimizer of torch's tells."""
        self.guard.answering(self._before_update)(optimizer, (), {})
        self.guard.looking(self._updated)(optimizer)

    def _updated(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """The optimizer has stepped: the only place at which the loop is led."""
        if threading.get_ident() != self._thread:
            self.of_threads = True
            return
        if self._at_work or self._is_recorded(optimizer):
            return
        begin = self.spending.working_since = self.clock.wall()
        self.is_in_hook = True
        conductor = self.conductor
        try:
            with self.at_work():
                if conductor is not None:
                    busy = conductor.updated(optimizer)
                else:
                    self._count(optimizer, begin)
        except BaseException as error:
            if conductor is not None and (raised_by_handler(error) or not isinstance(error, Exception)):
                with contextlib.suppress(Exception):  # of a signal: what was begun is not taken up again
                    conductor.close()
                    self.step_aside()
            raise
        finally:
            self.is_in_hook = False
            self.spending.working_since = None
        budget = self.errand.search_seconds
        leads = self.ranks is None or self.ranks.leads  # the others end when it has
        if budget is not None and leads and self.spending.elapsed > budget:
            self.step_aside()
        spent = self.clock.wall() - begin
        self.spending.waited += spent
        if conductor is not None and not busy:
            conductor.passed(spent)
            self.spending.around_calls += 0.0 if self.rest else spent

    def _is_recorded(self, optimizer: torch.optim.Optimizer) -> bool:
        """Is a CUDA graph being recorded? Its replays pass by all hooks, and meanwhile nothing may wait."""
        first = next((group["params"][0] for group in optimizer.param_groups if group["params"]), None)
        if first is None or not first.is_cuda or not torch.cuda.is_current_stream_capturing():
            return False
        (self.leave_alone if self.conductor is None else self.conductor.drop)(RECORDED)
        return True

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Optimizers that step inside are ours."""
        before, self._at_work = self._at_work, True
        try:
            yield
        finally:
            self._at_work = before

    def _count(self, optimizer: torch.optim.Optimizer, now: float) -> None:
        """Before a search."""
        if self.seen.is_past(optimizer):
            self.look_anew()
        if self.seen.ends_step(optimizer):
            self.num_steps += 1
            if self.num_steps == 1 and self.errand.search_seconds is None:
                self.errand.make_way()  # a run that is killed leaves no other one's plan as its own
            if self._looked:
                self._wait(optimizer, now)
            else:
                self._look(optimizer)

    def look_anew(self) -> None:
        """The script trains on with another optimizer."""
        self.seen = Seen(compiles=self.seen.compiles)
        self.step_seconds.clear()
        self._num_looked, self._looked = 0, False
        self._looking.restore()
        if not self.seen.compiles:
            self._look_at_calls()

    def _look(self, optimizer: torch.optim.Optimizer) -> None:
        self._num_looked += 1
        if self._num_looked < LOOKED_AT:
            self.seen.next_step()
            return
        self._looking.restore()
        self._looked = True
        self._loaders.restore()
        for kind in that_iterate_themselves(DataLoader):
            self._loaders.replace(kind, "__iter__", self._new_pass)
        self._faults = self.num_steps, page_faults()
        self._join()
        reason = why_left_alone(self.seen, together=self.ranks is not None)
        if reason:
            self.leave_alone(reason)
            return
        self.rest = why_only_the_rest(self.seen)
        self.calls = max(1, self.seen.calls)
        self._gradients.restore()
        self._own_updates.looked()
        if self.total_steps is None:  # for the second look to say something
            self.length.look(self.num_steps, self._steps_left(), self._steps_a_pass)
        self._last = self.clock.wall()
        if self.errand.plan is not None and self.ranks is None:
            self._begin(optimizer)

    def _join(self) -> None:
        """Meet the other processes that train the same model, where the script has any."""
        self.ranks = None
        if several() and self.total_steps is None:
            from vivace.live.ranks import joined

            self.ranks = joined(self.seen)

    def _wait(self, optimizer: torch.optim.Optimizer, now: float) -> None:
        """Note how long a step took, and begin when that is decided."""
        if not self.interrupted:
            self.step_seconds.append(now - self._last)
            self.timed = self.timed[0] + now - self._last, self.timed[1] + 1
        self.interrupted, self._last = False, now
        if self.num_steps % WARM_STEPS == WARM_STEPS - 1 and not (self.rest or self.seen.compiles):
            self._backwards = 0
            self._gradients.replace(torch.autograd, "backward", self._backward)  # for one step
        if self.num_steps % WARM_STEPS:
            return
        self._gradients.restore()
        self.calls, self._backwards = self._backwards or self.calls, 0
        if self.ranks is None:
            self._decide(optimizer)
        elif self.ranks.leads:
            self._lead(self.ranks, optimizer)
        else:
            self._follow(self.ranks, optimizer)

    def _lead(self, ranks: Ranks, optimizer: torch.optim.Optimizer) -> None:
        """Decide for all processes."""
        ranks.arrive(self.num_steps)
        if reason := ranks.missing:
            self.leave_alone(reason)
            return
        self._decide(optimizer)
        if self.conductor is None and not self.guard.off:
            ranks.lead(self.num_steps, None, WARM_STEPS)

    def _follow(self, ranks: Ranks, optimizer: torch.optim.Optimizer) -> None:
        """Begin where the first process has begun."""
        said = ranks.follow(self.num_steps)
        if isinstance(said, str):
            self.leave_alone(said)
        elif said is not None:
            self._begin(optimizer)

    def _decide(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin when a search is worth its time."""
        if self.errand.plan is not None:
            self._begin(optimizer)
            return
        if len(self.step_seconds) < WARM_STEPS:
            return
        seconds = self.median_seconds
        if seconds < SMALLEST_STEP_SECONDS:
            self.leave_alone("its steps take less than 0.2 ms, too little to gain from")
            return
        left = self._steps_left()
        if self.total_steps is None:
            self.length.look(self.num_steps, left, self._steps_a_pass)
        elif not self.spending.pays(self.copy_seconds, left * seconds):
            shown = words.duration(left * seconds)
            self.leave_alone(f"of this run about {shown} are left, too little for a search to pay")
            return
        if self.spending.begins(self.copy_seconds, self.seconds_left if self.length.is_said else math.inf):
            steps, before = self._faults  # what is imported now takes memory, too
            self.page_faults = (page_faults() - before) / (self.num_steps - steps)
            self._begin(optimizer)

    @property
    def median_seconds(self) -> float:
        """Of the steps that were timed."""
        return sorted(self.step_seconds)[len(self.step_seconds) // 2] if self.step_seconds else 0.0

    @property
    def copy_seconds(self) -> float:
        """Of a step on copies, about: of those that accumulate gradients one call is kept."""
        return self.median_seconds / self.calls

    def _seconds_to_come(self) -> float:
        """What the loops say, else this pass over the data."""
        said = self.length.num_steps - self.num_steps
        known = said if self.length.is_said and said > 0 else max(said, self._steps_left())
        return known * self.median_seconds

    @property
    def seconds_left(self) -> float:
        """As the script's own loops say; where they do not, the run goes on for as long as it has gone."""
        said = self.length.is_said and self.length.num_steps > self.num_steps
        is_known = self.total_steps is not None or said
        return max(self._seconds_to_come(), 0.0 if is_known else self.spending.elapsed)

    def _steps_left(self) -> float:
        """Of the run where that is known, else of this pass over the data."""
        if self.total_steps is not None:
            return self.total_steps - self.num_steps
        return max(0.0, self._steps_a_pass - (self.num_steps - self._pass[0]))

    @property
    def _steps_a_pass(self) -> float:
        return self._pass[1] / self.calls

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        from vivace.live.conductor import Conductor
        from vivace.live.kept import Weights

        self.rest = self.rest or why_only_the_rest(self.seen)  # as it is by now
        if self.rest and isinstance(optimizer, OwnUpdate):
            self.leave_alone(self.rest)
            return
        try:
            root = Weights(optimizer) if self.rest else self.seen.root
        except (TypeError, ValueError):  # what is updated are no parameters of a model
            self.leave_alone("what its optimizer updates are no parameters of a model")
            return
        self._watch(root)
        self.conductor = Conductor(self, root, optimizer, self.rest)

    def _watch(self, root: nn.Module) -> None:
        """Put the hooks into place by which the loop is led."""
        self._leading.restore()
        self._leading.replace(nn.Module, "eval", self._evaluating)  # what evaluates may call or trace parts
        if self.rest:
            self._gradients.restore()
        else:
            self._watch_gradients()
            self._leading.replace(type(root), self.seen.method, self._root_call)
            for name in HOOKING:
                self._leading.replace(nn.Module, name, self._hooking)

    def _root_call(self, original: Callable[..., Any]) -> Any:
        def call(module: nn.Module, *arguments: object, **keywords: object) -> Any:
            conductor = self.conductor
            other = conductor is None or module is not conductor.root or self._depth or self._at_work
            if other or threading.get_ident() != self._thread:
                return original(module, *arguments, **keywords)
            assert conductor is not None
            if self._is_recorded(conductor.optimizer):
                return original(module, *arguments, **keywords)
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
