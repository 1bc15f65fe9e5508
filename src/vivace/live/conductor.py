"""Leads a script's own steps: lets a plan act on the next one, times it, or keeps it to be taken on copies.

Every step trains. What is to be done next is decided by the course of the search, which wishes for segments
of steps or for a step to be kept; the hooks of the loop grant that here, one step after the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vivace.errors import Refused
from vivace.live.course import KEEP, Course, Wish, Wishes
from vivace.live.failing import Before, fails_alone
from vivace.live.followed import Followed
from vivace.live.hosted import Hosted, acts_on_calls, of_process_alone
from vivace.live.kept import CannotKeep, Kept, KeptCall, KeptUpdate, Weights, kept_in_closure
from vivace.live.own_update import OwnUpdate
from vivace.live.pairs import Pause, Segment, Timing
from vivace.live.ranks import MOST_STEPS
from vivace.live.refusals import why_of_model
from vivace.plan import Plan
from vivace.profiling.record.signals import raised_by_handler
from vivace.tensors.outside import of_library

if TYPE_CHECKING:
    from vivace.live.loop import Loop

LEFT_OUT = 20  # steps in a row, by a GradScaler, or as what was kept was another call
MOST_INTERRUPTED = 200  # steps, where hardly any other comes
HOOKS = 2  # around the call and after the update, about alike


class Conductor:
    """Made when a search is to begin, of which `course` holds what has come of it.

    `root` is the model that the loop calls. `rest` says why nothing may act on its calls, where that is so:
    then `root` is what the optimizer updates, and only the process's memory and the update are tried.
    """

    def __init__(self, loop: Loop, root: nn.Module, optimizer: torch.optim.Optimizer, rest: str = "") -> None:
        self.loop, self.root, self.optimizer, self.rest = loop, root, optimizer, rest
        self._optimizers = sorted(loop.seen.optimizers.values(), key=lambda each: each is not optimizer)
        self.clock, self.spending = loop.clock, loop.spending
        ranks = loop.ranks
        follows = ranks is not None and not ranks.leads
        self.course = Followed(loop, root, rest, self._host) if follows else Course(loop, root, rest)
        self._acting: Hosted | None = None
        self._wished = Plan()  # what is to act on the next call
        self._kept: Kept | None = None
        self._keeping = self._autocasts = False
        self.hooked = False  # have modules got hooks since the last call?
        self._calls = 0  # of the root since the last step
        self._before = Before(root, self.course.device)  # a call under a plan
        self._wish: Wish = Pause(self.course.reference, 1)
        self._done = self._interrupted = self._left_out = self._steps_of_others = 0
        self._wall = self._cpu = 0.0  # of the segment
        self._wishes: Wishes | None = self.course.wishes()
        self._advance(None)
        self._last = self._now()
        self._lead()

    # What the loop's hooks call.

    def called(
        self,
        original: Callable[..., Any],
        root: nn.Module,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> Any:
        """A call of the root, under the plan whose turn it is."""
        if not (root.training and torch.is_grad_enabled()):
            self.loop.interrupted = True
            self._stand_back()  # an evaluation is the script's own
            return original(root, *arguments, **keywords)
        self._calls += 1
        if self.hooked:
            self.hooked = False
            if reason := why_of_model(root):
                self._only_the_rest(reason)
                return original(root, *arguments, **keywords)
        self._require_own_precision()
        self._act(self._wished)
        if self._keeping and self._calls == 1:
            return self._kept_call(original, arguments, keywords)
        if self._acting is None or not acts_on_calls(self._acting.plan):  # where it fails, that is its own
            return original(root, *arguments, **keywords)
        plan = self._acting.plan
        self._before.take()
        try:
            return self._acting.call(partial(original, root), arguments, keywords)
        except Exception as error:
            if raised_by_handler(error) or not of_library(type(error).__module__):
                raise
            if self._fails_alone(error, arguments, keywords):
                raise
            reason = f"its model failed under {plan}: {type(error).__name__}: {error}"
        self.drop("; ".join(filter(None, (reason, self._before.lost))))
        return original(root, *arguments, **keywords)

    def _fails_alone(self, error: Exception, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
        """Is what a call raised under the plan the script's own fault? Then all is as the call left it, and
        the plan acts on the next one; else as it was before.
        """
        begin = self.clock.wall()
        self._stand_back()
        after = Before(self.root, self.course.device)
        after.take(whole=True)
        self._before.put_back()
        with self.loop.at_work():
            alone = fails_alone(error, self.loop.seen.method, self.root, arguments, keywords)
        if alone:
            after.put_back()
        self.loop.interrupted = True
        self.spending.waited += self.clock.wall() - begin
        return alone

    def updating(
        self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[Any, ...] | None:
        """The optimizer is about to step. Where the model cannot be led, what is kept begins here, or when a
        closure has computed the gradients: then it returns with what the optimizer is to be called.
        """
        if not (self.rest and self._keeping and optimizer is self.optimizer):
            return None
        self._keeping = False
        return kept_in_closure(arguments, keywords, self.loop.guard.looking(self._keep_update))

    def _keep_update(self) -> None:
        assert isinstance(self.root, Weights)
        try:
            self._kept = KeptUpdate(self.root, self.optimizer)
        except CannotKeep as error:
            self.drop(str(error))

    def updated(self, optimizer: torch.optim.Optimizer) -> bool:
        """The optimizer has stepped: a step of the script is over. Was there more to do than to count it?"""
        of_another = isinstance(optimizer, OwnUpdate) and not self._calls  # model's backward pass
        if optimizer is not self.optimizer or of_another:
            self._steps_of_others += 1
            is_new = not self.rest and not any(optimizer is known for known in self._optimizers)
            if is_new or self._steps_of_others > MOST_INTERRUPTED:
                self.drop("another optimizer began to step")
            return True
        self._steps_of_others = 0
        self._wait_at_the_end()
        now = self._now()
        step = Timing(now.wall - self._last.wall, now.cpu - self._last.cpu)
        whole, self.loop.interrupted = not self.loop.interrupted, False
        self.loop.num_steps += 1
        self.loop.calls, self._calls = self._calls or self.loop.calls, 0
        if self._is_awaited and self.loop.ranks is not None:
            self.loop.ranks.arrive(self.loop.num_steps)
        if self.loop.seen.differentiates_twice and not self.rest:
            self.drop("it differentiates gradients")
            return True
        self.course.stepped(step.wall if whole else None, self._plan_that_acts)
        wish = self._wish
        self._answer(step if whole else None)
        self._lead()
        self._last = self._now()
        return self._wish is not wish

    def _now(self) -> Timing:
        """The processor's clock is read only in timed segments: reading it is a system call, at which the
        system may let another process run, and that wait would count as ours.
        """
        return Timing(self.clock.wall(), self.clock.cpu() if isinstance(self._wish, Segment) else 0.0)

    def drop(self, reason: str) -> None:
        """Nothing acts any more, for a reason of the script's."""
        self.course.dropped(reason)
        self.close()
        self.loop.leave_alone(reason)

    def pause(self) -> None:
        """Nothing acts until the root's next call: somebody is going to read the script's objects."""
        self.loop.interrupted = True
        self._stand_back()

    def fail(self) -> None:
        """A fault of ours: nothing acts any more."""
        self.course.reason = self.loop.left_alone
        self.close()

    def close(self) -> None:
        """Leave the script's objects as they were."""
        self._wishes, self._wished, self._keeping = None, self.course.reference, False
        if self._kept is not None:
            self._kept.end()
            self._kept = None
        self._act(self.course.reference)

    def forked(self) -> None:
        """This is a child process: its optimizer updates as the script says, where no GPU is needed for that.
        What else is set stays, as taking it back may wait for threads that a child does not have.
        """
        if self._acting is not None and self.course.device.type == "cpu":
            with contextlib.suppress(Exception):
                self._acting.of_update.close()

    def let_go(self) -> None:
        """Hold nothing of the script's any more: it may train another model."""
        self.root = self.course.root = nn.Module()
        self._before = Before(self.root, self.course.device)
        self._optimizers = []
        vars(self).pop("optimizer", None)

    def passed(self, seconds: float) -> None:
        """A step has only passed by, and the hook after its update has taken so long."""
        self.course.seconds_of_hooks = HOOKS * seconds

    # Processes that train together.

    @property
    def _is_awaited(self) -> bool:
        """Do other processes wait for what this one decides after this step?"""
        ranks = self.loop.ranks
        return ranks is not None and ranks.leads and self.loop.num_steps >= ranks.next_step

    def _lead(self) -> None:
        """Tell them what acts from here on."""
        ranks, wish = self.loop.ranks, self._wish
        if ranks is None or not self._is_awaited or self._wishes is None:
            return
        steps = min(MOST_STEPS, wish.steps - self._done) if isinstance(wish, Pause) else 1
        if reason := ranks.lost or ranks.lead(self.loop.num_steps, self._wished, steps):
            self.drop(reason)

    def _host(self, plan: Plan) -> str:
        """Let a plan act, if it can; else why it cannot."""
        try:
            self._act(self.course.reference)
            self._act(plan)
        except Exception as error:
            if raised_by_handler(error):
                raise
            return str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
        return ""

    # Steps and wishes.

    @property
    def _plan_that_acts(self) -> Plan:
        return self._acting.plan if self._acting is not None else self.course.reference

    def _act(self, plan: Plan) -> None:
        if plan is self._plan_that_acts or (not plan.techniques and self._acting is None):
            return
        begin = self.clock.wall()
        with self.loop.at_work():
            if self._acting is not None:
                acting, self._acting = self._acting, None
                acting.close()
            if plan.techniques:
                parts = self.loop.seen.parts
                self._acting = Hosted(plan, self.root, self.optimizer, self.course.machine, parts=parts)
        if not self.loop.is_in_hook:
            self.spending.waited += self.clock.wall() - begin

    def _stand_back(self) -> None:
        """Let nothing act on the script's objects. What is the process's alone stays: memory is not free."""
        if self._acting is not None and not of_process_alone(self._acting.plan):
            self._act(self.course.reference)

    def _require_own_precision(self) -> None:
        """A plan was proven within the precision that the script had then."""
        autocasts = torch.is_autocast_enabled(self.course.device.type)
        if autocasts != self._autocasts:
            self._autocasts = autocasts
            if self._wished.techniques or self._acting is not None or not self.loop.seen.autocasts:
                self.drop("it changes its precision while it trains (autocast)")

    def _kept_call(
        self, original: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        begin, root = self.clock.wall(), self.root
        self._keeping = False
        kept = None
        try:
            self._kept = kept = KeptCall(root, self._optimizers, arguments, keywords)
            kept.method, kept.parts = self.loop.seen.method, self.loop.seen.parts
        except CannotKeep as error:
            self._only_the_rest(str(error))
        self.spending.waited += self.clock.wall() - begin
        outputs = original(root, *arguments, **keywords)
        if kept is not None:
            kept.returned(outputs)
        return outputs

    def _answer(self, step: Timing | None) -> None:
        """Give the course what it waits for, if this step completes it; None for a step unlike the others."""
        wish = self._wish
        if isinstance(wish, Pause):
            self._done += 1
            if self._done >= wish.steps:
                self._advance(None)
        elif isinstance(wish, Segment):
            self._timed(wish, step)
        elif self._kept is not None:
            self._completed()

    def _timed(self, segment: Segment, step: Timing | None) -> None:
        if step is None:
            self._interrupted += 1
            if self._interrupted > MOST_INTERRUPTED + 4 * self._done:
                self.drop("it evaluates, or begins a pass over its data, at nearly every step")
            return
        self._done += 1
        if self._done <= segment.settling:
            if self._done == segment.settling:
                self._wait()
            return
        self._wall += step.wall
        self._cpu += step.cpu
        if self._done == segment.settling + segment.steps:
            own = self.course.seconds_of_hooks if segment.plan.techniques else 0.0  # alone it has none
            self._advance(Timing(self._wall / segment.steps + own, self._cpu / segment.steps + own))

    def _completed(self) -> None:
        kept, self._kept = self._kept, None
        assert kept is not None
        kept.end()
        if isinstance(kept, KeptUpdate):
            assert isinstance(self.root, Weights)
            kept.stepped(self.root)
        elif self.loop.seen.scalers:
            kept.scale = next(iter(self.loop.seen.scalers.values())).get_scale()
        if (kept.overflowed or not kept.is_step) and self._left_out < LEFT_OUT:
            self._left_out += 1
            self._keeping = True
            return
        self._left_out = 0
        self._advance(kept)

    def _wait_at_the_end(self) -> None:
        """A device works on after its steps were given to it: the clock of a segment ends when it is done."""
        if isinstance(self._wish, Segment) and self._done + 1 == self._wish.settling + self._wish.steps:
            self._wait()

    def _wait(self) -> None:
        if self.course.device.type == "cuda":
            torch.cuda.synchronize(self.course.device)

    def _advance(self, answer: Timing | Kept | None) -> None:
        """Ask the course for its next wish."""
        if self._wishes is None:
            return
        try:
            wish = self._wishes.send(answer)
        except StopIteration:
            self.close()
            self.loop.step_aside()
            return
        except CannotKeep as error:
            self._only_the_rest(str(error))
            return
        self._wish = wish
        self._done, self._interrupted, self._wall, self._cpu = 0, 0, 0.0, 0.0
        self._keeping = wish is KEEP
        self._wished = wish.plan if isinstance(wish, (Segment, Pause)) else self.course.reference
        self._act(self._wished)
        self._wait()

    def _only_the_rest(self, reason: str) -> None:
        """The model's calls cannot be led; what else there is may still act."""
        if self.rest or self.course.plan.techniques:
            self.drop(reason)
            return
        self.close()
        self.loop.only_the_rest(self.optimizer, reason)
