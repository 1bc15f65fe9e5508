"""Leads a script's own steps: which plan acts on the next one, what is proven, timed, adopted and taken back.

Every step trains. What is decided is a generator, `_course`, which asks for segments of steps or for a step
to be kept; the hooks of the loop answer it, one step after the other.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vivace.inspection import inspect
from vivace.ledger import Ledger
from vivace.live.candidates import PRECISION_COSTS, adding, additions, convolves, own_settings
from vivace.live.compiling import PASSING_SHARE, Compiling
from vivace.live.errand import LEDGER, PLAN
from vivace.live.hosted import Hosted, of_process_alone
from vivace.live.kept import CannotKeep, Kept, KeptCall, KeptUpdate, Weights, kept_in_closure
from vivace.live.pairs import LOOKS, Comparison, Pair, Pause, Segment, Timing, compared, length, middle
from vivace.live.proof import Proof, Verdict, times_on_copies
from vivace.live.refusals import device_of
from vivace.plan import Plan
from vivace.profiling.record.signals import raised_by_handler
from vivace.technique import Technique
from vivace.tensors.modules import untouched
from vivace.tensors.randomness import StreamNotes
from vivace.words import duration

if TYPE_CHECKING:
    from vivace.live.loop import Loop

SEGMENT_SECONDS = 0.12
LONG_STEP_SECONDS = (1.0, 0.1)  # with convolutions, without: in shorter ones the making of kernels shows
HOPELESS = 0.8  # times as fast, on a copy of the step: not tried on the script's own
WATCH_STEPS, MOST_WATCH_STEPS = 200, 20_000  # between two looks at a plan that was adopted, doubling
WATCHED_PAIRS = 12  # of the newest, for the ratio
SOON_STEPS, SURE = 40, 1.1  # after so many a plan is timed again that may be less than so much faster
OVERFLOWS = 20  # steps in a row that a GradScaler leaves out
SEARCHED_STEPS = 20  # until the second proof, where nothing but the search is wanted
MOST_INTERRUPTED = 200  # steps, where hardly any other comes
HOOKS = 2  # around the call and after the update, about alike
NOT_FASTER = "nothing that was tried is faster and trains the same model"
NOTHING_TO_TRY = "there was nothing to try"
NOTHING_PROMISED = "nothing promises enough, on copies of a step, to be tried on its own steps"
KEEP = object()
Wish = Segment | Pause | object
Course = Generator[Wish, Any, None]


class Conductor:
    """Made when a search is to begin; `plan` is the one that is adopted.

    `root` is the model that the loop calls. `rest` says why nothing may act on its calls, where that is so:
    then `root` is what the optimizer updates, and only the process's memory and the update are tried.
    """

    def __init__(self, loop: Loop, root: nn.Module, optimizer: torch.optim.Optimizer, rest: str = "") -> None:
        self.loop, self.root, self.optimizer, self.rest = loop, root, optimizer, rest
        self._optimizers = sorted(loop.seen.optimizers.values(), key=lambda each: each is not optimizer)
        self.clock, self.spending = loop.clock, loop.spending
        self.device, self.machine = device_of(root), inspect()
        self.plan, self.reference = Plan(), Plan()
        self.comparison: Comparison | None = None  # of the adopted plan with the script as it is
        self._confirms = True  # is that still to be timed?
        self.own = own_settings(loop.seen, root, loop.page_faults, rest)
        self.compiling = Compiling(self.own)
        self.tried: list[dict[str, Any]] = []
        self.verdicts: list[Verdict] = []  # on the adopted plan
        self.plan_seconds, self.plan_steps = 0.0, 0  # of steps under the adopted plan
        self.saved_before = 0.0  # seconds, at least, by parts of that plan
        self.reason = ""  # why nothing acts
        self.is_settled = False  # has the search ended?
        self.ledger = Ledger(Path(loop.errand.folder) / LEDGER)
        self.hook_seconds = 0.0  # of a step that only passes by
        self._acting: Hosted | None = None
        self._wished = Plan()  # what is to act on the next call
        self._kept: Kept | None = None
        self._keeping = self._autocasts = False
        self._calls = 0  # of the root since the last step
        self._streams = StreamNotes(self.device)
        self._wish: Wish = Pause(self.reference, 1)
        self._done = self._interrupted = self._overflows = self._steps_of_others = 0
        self._wall = self._cpu = 0.0  # of the segment
        self._last = Timing(self.clock.wall(), self.clock.cpu())
        self._step_seconds = deque(loop.step_seconds, maxlen=21)
        self._course: Course | None = self._led()
        self._advance(None)

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
        self._require_own_precision()
        self._act(self._wished)
        if self._keeping and self._calls == 1:
            return self._kept_call(original, arguments, keywords)
        if self._acting is None:
            return original(root, *arguments, **keywords)
        self._streams.take()
        try:
            return self._acting.call(partial(original, root), arguments, keywords)
        except Exception as error:  # the plan's fault or the script's own: the call without the plan shows it
            if raised_by_handler(error):
                raise
            reason = f"its model failed under {self._acting.plan}: {type(error).__name__}: {error}"
        self.drop("; ".join(filter(None, (reason, self._streams.put_back()))))
        return original(root, *arguments, **keywords)

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
        if optimizer is not self.optimizer:
            self._steps_of_others += 1
            is_new = not self.rest and not any(optimizer is known for known in self._optimizers)
            if is_new or self._steps_of_others > MOST_INTERRUPTED:
                self.drop("another optimizer began to step")
            return True
        self._steps_of_others = 0
        self._wait_at_the_end()
        wall, cpu = self.clock.wall(), self.clock.cpu()
        step = Timing(wall - self._last.wall, cpu - self._last.cpu)
        whole, self.loop.interrupted = not self.loop.interrupted, False
        self.loop.num_steps += 1
        self._calls = 0
        if self.loop.seen.differentiates_twice and not self.rest:
            self.drop("it differentiates gradients")
            return True
        if whole:
            self._step_seconds.append(step.wall)
        if self._acting is not None and self._acting.plan is self.plan and self.plan.techniques:
            self.plan_steps += 1
            self.plan_seconds += step.wall if whole else self.step_seconds
        wish = self._wish
        self._answer(step if whole else None)
        self._last = Timing(self.clock.wall(), self.clock.cpu())
        return self._wish is not wish

    def drop(self, reason: str) -> None:
        """Nothing acts any more, for a reason of the script's."""
        self.reason = reason
        self._record("dropped", {"plan": self.plan.to_dict(), "reason": reason})
        self.plan = Plan()
        self.close()
        self.loop.leave_alone(reason)

    def pause(self) -> None:
        """Nothing acts until the root's next call: somebody is going to read the script's objects."""
        self.loop.interrupted = True
        self._stand_back()

    def fail(self) -> None:
        """A fault of ours: nothing acts any more."""
        self.reason = self.loop.left_alone
        self.close()

    def close(self) -> None:
        """Leave the script's objects as they were."""
        self._course, self._wished, self._keeping = None, self.reference, False
        if self._kept is not None:
            self._kept.end()
            self._kept = None
        self._act(self.reference)

    def let_go(self) -> None:
        """Hold nothing of the script's any more: it may train another model."""
        self.root, self._optimizers = nn.Module(), []
        vars(self).pop("optimizer", None)

    @property
    def step_seconds(self) -> float:
        """The median of the newest steps."""
        found = sorted(self._step_seconds)
        return found[len(found) // 2] if found else 0.0

    # Steps and wishes.

    def _act(self, plan: Plan) -> None:
        now = self._acting.plan if self._acting is not None else self.reference
        if plan is now or (not plan.techniques and self._acting is None):
            return
        begin = self.clock.wall()
        with self.loop.at_work():
            if self._acting is not None:
                acting, self._acting = self._acting, None
                acting.close()
            if plan.techniques:
                self._acting = Hosted(plan, self.root, self.optimizer, self.machine)
        if not self.loop.is_in_hook:
            self.spending.waited += self.clock.wall() - begin

    def _stand_back(self) -> None:
        """Let nothing act on the script's objects. What is the process's alone stays: memory is not free."""
        if self._acting is not None and not of_process_alone(self._acting.plan):
            self._act(self.reference)

    def _require_own_precision(self) -> None:
        """A plan was proven within the precision that the script had then."""
        autocasts = torch.is_autocast_enabled(self.device.type)
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
            kept.method = self.loop.seen.method
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
            own = HOOKS * self.hook_seconds if segment.plan.techniques else 0.0  # alone it has none
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
        if kept.overflowed and self._overflows < OVERFLOWS:
            self._overflows += 1
            self._keeping = True
            return
        self._overflows = 0
        self._advance(kept)

    def _wait_at_the_end(self) -> None:
        """A device works on after its steps were given to it: the clock of a segment ends when it is done."""
        if isinstance(self._wish, Segment) and self._done + 1 == self._wish.settling + self._wish.steps:
            self._wait()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _advance(self, answer: Timing | Kept | None) -> None:
        """Ask the course for its next wish."""
        if self._course is None:
            return
        try:
            wish = self._course.send(answer)
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
        self._wished = wish.plan if isinstance(wish, (Segment, Pause)) else self.reference
        self._act(self._wished)
        self._wait()

    def _only_the_rest(self, reason: str) -> None:
        """The model's calls cannot be led; what else there is may still act."""
        if self.rest or self.plan.techniques:
            self.drop(reason)
            return
        self.close()
        self.loop.only_the_rest(self.optimizer, reason)

    # The course.

    def _led(self) -> Course:
        cost = yield from self._sought()
        self.is_settled = True
        while not self.plan.techniques and self.spending.will_compile(self.compiling.seconds):
            if self.spending.compiles(self.compiling.seconds):
                cost = yield from self._compiled()
            elif HOOKS * self.hook_seconds > PASSING_SHARE * self.step_seconds:
                return
            else:
                yield Pause(self.plan, WATCH_STEPS)
        if self.plan.techniques:
            yield from self._watch(cost)

    def _sought(self) -> Generator[Wish, Any, float]:
        """Adopt what is given or found; returns about the seconds of a proof."""
        given = self.loop.errand.plan
        kept: Kept = yield KEEP
        with untouched(self.root):
            proof = Proof(kept, self.machine, self.clock)
        plan = (yield from self._search(proof)) if given is None else self._given(proof, given)
        if given is None:
            self.compiling.foretell(proof, self.spending)
        cost = proof.end(plan)
        if not plan.techniques:
            return 0.0
        if self._confirms:
            yield from self._confirmed(plan)
        return cost

    def _afforded(self, seconds: float) -> Course:
        """Let steps pass until so much may be spent."""
        while not self.spending.affords(seconds, self.step_seconds):
            yield self._until(seconds)

    def _until(self, seconds: float) -> Pause:
        return Pause(self.plan, min(WATCH_STEPS, self.spending.steps_until(seconds, self.step_seconds)))

    def _worth(self, plan: Plan, ratio: float | None, seconds: float) -> Generator[Wish, Any, bool]:
        """Let steps pass until so much may be spent on a plan, whose copy of a step is so many times as fast,
        where that is known; False as soon as too few are left for that to pay.
        """
        while self.spending.promises(ratio or 1.0, seconds, self.loop.seconds_left):
            if self.spending.affords(seconds, self.step_seconds):
                return True
            yield self._until(seconds)
        shown = f"{ratio:.2f}x as fast on a copy of a step, " if ratio else ""
        self._note(plan, f"{shown}too little for the steps that are left")
        return False

    def _given(self, proof: Proof, given: dict[str, dict[str, Any]]) -> Plan:
        plan = Plan.from_dict(given)
        proof.may_compile = True
        verdict = proof.judge(plan)
        self.spending.compiling += verdict.seconds if plan.compiles else 0.0
        self._note(plan, "given", verdict)
        self.reason = "" if verdict.kept else f"the plan is not kept here: {verdict.reason}"
        self.verdicts = [verdict] if verdict.kept else []
        return plan if verdict.kept else Plan()

    def _search(self, proof: Proof) -> Generator[Wish, Any, Plan]:
        """Add what makes it faster, the most promising first."""
        base = Plan()
        done = {base}
        groups = additions(self.root, self.machine, self.own)
        rounds = 1 if self.step_seconds > LONG_STEP_SECONDS[not convolves(self.root)] else 2
        yield from self._afforded((1 + len(groups)) * rounds * self.step_seconds)
        for group, ratio in self._ranked(proof, groups, rounds):
            plan = adding(base, group)
            if plan in done:
                continue
            done.add(plan)
            if not (yield from self._worth(adding(Plan(), group), ratio, proof.expected_seconds(plan))):
                continue
            base = yield from self._tried(base, plan, proof.judge(plan))
        self.spending.hoped = 0.0
        if not base.techniques:
            judged = any("verdict" in entry for entry in self.tried)
            self.reason = NOT_FASTER if judged else NOTHING_PROMISED if groups else NOTHING_TO_TRY
        return base

    def _tried(self, base: Plan, plan: Plan, verdict: Verdict) -> Generator[Wish, Any, Plan]:
        """Adopt a plan that is proven and, beside `base`, faster; returns which of both acts then."""
        if not verdict.kept:
            self._note(plan, "not_kept", verdict)
            return base
        comparison = yield from self._compare(base, plan)
        if comparison is None:
            self._note(plan, "much slower on the script's own steps", verdict)
            return base
        self._note(plan, "faster" if comparison.faster else "not_faster", verdict, comparison)
        if not comparison.faster:
            return base
        self._confirms, self.verdicts = bool(base.techniques), [verdict]
        self.comparison = self.comparison or comparison  # of the first addition, until confirmed
        self._adopt(plan, comparison)
        return plan

    def _compiled(self) -> Generator[Wish, Any, float]:
        """Compile the model's call, and keep that where it is faster; about the seconds of a proof."""
        about, base, plan = self.compiling.seconds, self.plan, self.compiling.taken(self.plan)
        kept: Kept = yield KEEP
        begin = self.clock.wall()
        self.loop.say(f"compiling a copy of the model, once, for about {duration(about)}")
        with untouched(self.root):
            proof = Proof(kept, self.machine, self.clock)
        proof.may_compile = True
        verdict = proof.judge(plan)
        cost = proof.end(plan)
        self.spending.compiling += self.clock.wall() - begin
        if (yield from self._tried(base, plan, verdict)) == plan and self._confirms:
            yield from self._confirmed(plan)
        return cost

    def _ranked(
        self, proof: Proof, groups: list[list[Technique]], rounds: int
    ) -> list[tuple[list[Technique], float | None]]:
        """The groups that can act, and how many times as fast copies of the step are under each, where copies
        can tell; the fastest first, without what is much slower.
        """
        for name, why in self.own.items():
            self.tried.append({"plan": {name: {}}, "answer": why, "step": self.loop.num_steps})
        plans = {adding(Plan(), group): group for group in groups}
        alone = list(filter(of_process_alone, plans))  # only the script's own steps can tell
        times, refused = times_on_copies(proof, [plan for plan in plans if plan not in alone], rounds)
        for plan, reason in refused.items():
            self._note(plan, reason)
        for plan, ratio in times.items():
            if ratio < HOPELESS:
                self._note(plan, f"{ratio:.2f}x as fast on a copy of a step")
        hopeful = [plan for plan, ratio in times.items() if ratio >= HOPELESS] + alone
        hopeful.sort(key=lambda p: -times.get(p, 1.0) / (1.0 + PRECISION_COSTS * bool(p.precision)))
        ranked = [{"plan": plan.to_dict(), "ratio": times.get(plan)} for plan in hopeful]
        self._record("ranked", {"step": self.loop.num_steps, "on_copies": ranked})
        return [(plans[plan], times.get(plan)) for plan in hopeful]

    def _compare(self, base: Plan, plan: Plan) -> Generator[Wish, Any, Comparison | None]:
        """Let both take turns; None where the plan is so slow that this was stopped."""
        steps = length(self.step_seconds, SEGMENT_SECONDS)
        pairs: list[Pair] = []
        before = yield Segment(base, steps)
        while True:
            settling = 1 if pairs else 2
            here = yield Segment(plan, steps, settling)
            after = yield Segment(base, steps)
            pairs.append(pair := Pair(middle(before, after), here))
            before = after
            sign = -1 if plan == self.plan else 1  # of a plan that acts the other turns are what costs
            self.spending.lost += max(0.0, sign * (here.wall - pair.reference.wall)) * (steps + settling)
            if len(pairs) == 2 and all(pair.is_hopeless for pair in pairs):
                return None
            if len(pairs) in LOOKS:
                found = compared(pairs, by_processor=self.device.type == "cpu")
                if found.faster or found.is_futile or len(pairs) == LOOKS[-1]:
                    return found
            if len(pairs) > 2 and not self.spending.affords(0.0, self.step_seconds):
                yield from self._afforded(0.0)
                before = yield Segment(base, steps)

    def _adopt(self, plan: Plan, comparison: Comparison) -> None:
        if plan != self.plan:
            self._count_saved()
        self.plan = plan
        plan.save(Path(self.loop.errand.folder) / PLAN)
        self._record("adopted", {"plan": plan.to_dict(), "step": self.loop.num_steps, **comparison.to_dict()})

    def _count_saved(self) -> None:
        """What the plan has saved so far, before it becomes another."""
        if self.plan.techniques and self.comparison is not None:
            self.saved_before += self.plan_seconds * max(0.0, self.comparison.wall.low - 1.0)
            self.plan_seconds = 0.0

    def _confirmed(self, plan: Plan) -> Course:
        """Time a plan that was put together, or given, beside the script as it is."""
        comparison = yield from self._compare(self.reference, plan)
        self.comparison = comparison or self.comparison
        if comparison is not None and self.loop.errand.plan is not None:
            self.tried[0] |= comparison.to_dict()  # which was "given"
        if comparison is not None and comparison.faster:
            self._adopt(plan, comparison)
            return
        shown = "much slower" if comparison is None else comparison.shown
        self._take_back(f"{plan} was not faster than the run as it is ({shown})")

    def _watch(self, cost: float) -> Course:
        """Let it act; from time to time prove it and time it again, and take it back where either fails.

        `cost`: seconds of a proof, about.
        """
        wait = SEARCHED_STEPS if self.spending.is_free else WATCH_STEPS
        if not self.spending.is_free and self.comparison is not None and self.comparison.wall.low < SURE:
            yield Pause(self.plan, SOON_STEPS)  # the first of several timings that says yes flatters
            yield from self._time_again()
        while self.plan.techniques:
            yield Pause(self.plan, wait)
            yield from self._afforded(cost)
            wait = min(2 * wait, MOST_WATCH_STEPS)
            before = self.spending.waited
            kept = yield KEEP
            begin = self.clock.wall()
            proof = Proof(kept, self.machine, self.clock)
            verdict = proof.judge(self.plan)
            proof.end(self.plan)
            cost = self.spending.waited - before + self.clock.wall() - begin
            self.verdicts.append(verdict)
            self._record("watched", {"step": self.loop.num_steps, **verdict.to_dict()})
            if not verdict.kept:
                self._take_back(f"its step is no longer the same: {verdict.reason}")
                return
            yield from self._time_again()
            if self.plan.techniques and self.spending.compiles(self.compiling.seconds):
                cost = yield from self._compiled()
            if self.spending.is_free:
                return

    def _time_again(self) -> Course:
        """Three pairs, and more where these say that it is slower: the new ones alone decide on that."""
        steps = length(self.step_seconds, 2 * SEGMENT_SECONDS)
        assert self.comparison is not None
        by_processor = self.comparison.by_processor
        pairs: list[Pair] = []
        before = yield Segment(self.reference, steps)
        while True:
            here = yield Segment(self.plan, steps)
            after = yield Segment(self.reference, steps)
            pairs.append(pair := Pair(middle(before, after), here))
            before = after
            self.spending.lost += max(0.0, pair.reference.wall - here.wall) * (steps + 1)
            if len(pairs) < 3:
                continue
            found = compared(pairs, by_processor=by_processor)
            if found.slower or found.wall.estimate >= 1.0 or len(pairs) == WATCHED_PAIRS:
                break
        every = [*self.comparison.pairs, *pairs]
        self.comparison = compared(every[-WATCHED_PAIRS:], by_processor=by_processor)
        self._record("timed", {"step": self.loop.num_steps, **self.comparison.to_dict()})
        if found.slower:
            self._take_back(f"it became slower ({found.shown})")
        elif len(pairs) == WATCHED_PAIRS and found.gains_nothing:
            self._take_back(f"its later steps are not faster ({found.shown})")

    def _take_back(self, reason: str) -> None:
        self.reason = reason
        self._record("taken_back", {"plan": self.plan.to_dict(), "reason": reason})
        if self.loop.errand.plan is None:  # a given plan is the person's
            (Path(self.loop.errand.folder) / PLAN).unlink(missing_ok=True)
        self.plan = Plan()

    def _note(
        self, plan: Plan, answer: str, verdict: Verdict | None = None, comparison: Comparison | None = None
    ) -> None:
        told = comparison.to_dict() if comparison is not None else {}
        entry = {"plan": plan.to_dict(), "answer": answer, "step": self.loop.num_steps, **told}
        entry |= {"verdict": verdict.to_dict()} if verdict is not None else {}
        self.tried.append(entry)
        self._record("tried", entry)

    def _record(self, kind: str, document: dict[str, Any]) -> None:
        self.ledger.append(kind, {"process": os.getpid(), **document})
