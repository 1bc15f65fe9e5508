"""Leads a script's own steps: which plan acts on the next one, what is proven, timed, adopted and taken back.

Every step trains. What is decided is a generator, `_course`, which asks for segments of steps or for a step
to be kept; the hooks of the loop answer it, one step after the other.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vivace import words
from vivace.errors import Refused
from vivace.inspection import inspect
from vivace.ledger import Ledger, Ratio
from vivace.live.candidates import adding, additions
from vivace.live.errand import LEDGER, PLAN
from vivace.live.hosted import Hosted
from vivace.live.kept import CannotKeep, Kept
from vivace.live.pairs import LOOKS, Comparison, Pair, Segment, Timing, compared, length, middle
from vivace.live.proof import Proof, Verdict
from vivace.live.refusals import device_of
from vivace.plan import Plan
from vivace.technique import Stage, Technique

if TYPE_CHECKING:
    from vivace.live.loop import Loop

WARM_STEPS = 8
# Before anything is tried, so many times its cost must have passed: a short script is over by then.
PATIENCE, COST_SECONDS, COST_STEPS = 2.0, 1.0, 40
WORTH = 5.0  # times its cost must be left of a loop whose length is known
SEGMENT_SECONDS = 0.12
PRECISION_COSTS = 0.1  # so much faster must be what rounds more than fp32
LONG_STEP_SECONDS = 0.1
HOPELESS = 0.8  # times as fast, on a copy of the step: not tried on the script's own
WATCH_STEPS, MOST_WATCH_STEPS = 200, 20_000  # between two looks at a plan that was adopted, doubling
WATCHED_PAIRS = 12  # of the newest, for the ratio
OWN_SHARE = 0.1  # of the elapsed time: what proofs may take before a watch is put off
KEEP = object()

Wish = Segment | object
Answer = Timing | Kept | None
Course = Generator[Wish, Any, None]


class Conductor:
    """Made when the loop's root and optimizer are known; `plan` is the one that is adopted."""

    def __init__(self, loop: Loop, root: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.loop, self.root, self.optimizer = loop, root, optimizer
        self.device = device_of(root)
        self.machine = inspect()
        self.plan, self.reference = Plan(), Plan()
        self.comparison: Comparison | None = None  # of the adopted plan with the script as it is
        self._confirms = True  # is that still to be timed?
        self.tried: list[dict[str, Any]] = []
        self.verdicts: list[Verdict] = []  # on the adopted plan
        self.plan_seconds, self.plan_steps = 0.0, 0  # of steps under the adopted plan
        self.reason = ""  # why nothing acts
        self.is_settled = False  # has the search ended?
        self.ledger = Ledger(Path(loop.errand.folder) / LEDGER)
        self._acting: Hosted | None = None
        self._wished = Plan()  # what is to act on the next call
        self._kept: Kept | None = None
        self._keeping = False
        self._calls = 0  # of the root since the last step
        self._segment: Segment | None = None
        self._done = 0
        self._began = self._spent = 0.0, 0.0  # by the wall's clock and by the processor's
        self._first = self._last = time.perf_counter()
        self._step_seconds: list[float] = []
        self._course: Course | None = self._led()
        self._fault = False
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
            self._act(Plan())  # an evaluation is the script's own
            return original(root, *arguments, **keywords)
        self._calls += 1
        self._act(self._wished)
        if self._keeping and self._calls == 1:
            return self._kept_call(original, arguments, keywords)
        if self._acting is None:
            return original(root, *arguments, **keywords)
        before = _random_states(self.device)
        try:
            return self._acting.call(partial(original, root), arguments, keywords)
        except Exception as error:  # the plan's fault or the script's own: the call without the plan shows it
            _set_random_states(before, self.device)
            self.drop(f"its model failed under {self._acting.plan}: {type(error).__name__}: {error}")
            return original(root, *arguments, **keywords)

    def updated(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has stepped: a step of the script is over."""
        seen = self.loop.seen
        if optimizer is not self.optimizer:
            if id(optimizer) in seen.optimizers:
                self.drop("a second optimizer began to step")
            return
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self.loop.num_steps += 1
        self._calls = 0
        if seen.differentiates_twice or seen.scales_loss:
            self.drop("it differentiates gradients, or scales its loss")
            return
        whole = not self.loop.interrupted
        if whole:
            self._step_seconds = [*self._step_seconds[-20:], seconds]
        if self._acting is not None and self._acting.plan is self.plan and self.plan.techniques:
            self.plan_steps += 1
            self.plan_seconds += seconds if whole else self.step_seconds
        self._answer(whole)
        self.loop.interrupted = False
        self._last = time.perf_counter()

    def drop(self, reason: str) -> None:
        """Nothing acts any more, for a reason of the script's."""
        self.reason = reason
        self._record("dropped", {"plan": self.plan.to_dict(), "reason": reason})
        self.plan = Plan()
        self.close()
        self.loop.leave_alone(reason)

    def fail(self, error: Exception) -> None:
        """A fault of ours: nothing acts any more."""
        self._fault = True
        self.reason = f"a fault of Vivace's own, {type(error).__name__}: {error}"
        self.close()

    def rest(self) -> None:
        """Nothing acts until the root's next call: somebody is going to read the script's objects."""
        self.loop.interrupted = True
        self._act(self.reference)

    def close(self) -> None:
        """Leave the script's objects as they were."""
        self._course = None
        if self._kept is not None:
            self._kept.end()
        self._act(Plan())

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
        with self.loop.at_work():
            if self._acting is not None:
                acting, self._acting = self._acting, None
                acting.close()
            if plan.techniques:
                self._acting = Hosted(plan, self.root, self.optimizer, self.machine)

    def _kept_call(
        self, original: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        begin = time.perf_counter()
        self._keeping = False
        try:
            self._kept = Kept(self.root, self.optimizer, arguments, keywords)
        except CannotKeep as error:
            self.drop(str(error))
        self.loop.own_seconds += time.perf_counter() - begin
        outputs = original(self.root, *arguments, **keywords)
        if self._kept is not None:
            self._kept.returned(outputs)
        return outputs

    def _answer(self, whole: bool) -> None:
        """Give the course what it waits for, if this step completes it."""
        segment = self._segment
        if segment is None:
            kept, self._kept = self._kept, None
            if kept is not None:
                kept.end()
                self._advance(kept)
            return
        if not whole:
            self._leave_out()
            return
        self._done += 1
        if self._done <= segment.settling:
            if self._done == segment.settling:
                self._start_clock()
            return
        is_last = self._done == segment.settling + segment.steps
        if is_last or self.device.type == "cpu":
            self._add_up()
        if is_last:
            wall, cpu = self._spent
            self._advance(Timing(wall / segment.steps, cpu / segment.steps))

    def _leave_out(self) -> None:
        """Leave a step out of the time: an evaluation, a new pass over the data or a checkpoint fell into it.

        A device is behind by then, and the time of the steps before is not known: the segment begins anew.
        """
        if self.device.type == "cpu":
            self._began = time.perf_counter(), time.process_time()
        else:
            self._done = 0

    def _start_clock(self) -> None:
        self._wait()
        self._spent = 0.0, 0.0
        self._began = time.perf_counter(), time.process_time()

    def _add_up(self) -> None:
        self._wait()
        now = time.perf_counter(), time.process_time()
        self._spent = self._spent[0] + now[0] - self._began[0], self._spent[1] + now[1] - self._began[1]
        self._began = now

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _advance(self, answer: Answer) -> None:
        """Ask the course for its next wish."""
        if self._course is None:
            return
        try:
            wish = self._course.send(answer)
        except StopIteration:
            self._course = None
            return
        except CannotKeep as error:
            self.drop(str(error))
            return
        self._done = 0
        if isinstance(wish, Segment):
            self._segment, self._wished = wish, wish.plan
            self._act(wish.plan)
            if not wish.settling:
                self._start_clock()
        else:
            self._segment, self._wished, self._keeping = None, self.reference, True
            self._act(self.reference)

    # The course.

    def _led(self) -> Course:
        yield from self._sought()
        self.is_settled = True
        if self.plan.techniques:
            yield from self._watch()

    def _sought(self) -> Course:
        given = self.loop.errand.plan
        while given is None and self._is_early():
            yield Segment(self.reference, 1, 0)
        if given is None and self._is_late():
            left = words.duration(self._seconds_left() or 0.0)
            self.reason = f"of this run about {left} are left, too little for a search to pay"
            return
        kept: Kept = yield KEEP
        proof = Proof(kept, self.machine)
        plan = self._given(proof, given) if given is not None else (yield from self._search(proof))
        if not plan.techniques:
            return
        del proof, kept
        if self._confirms:
            yield from self._confirmed(plan)

    @property
    def _cost_seconds(self) -> float:
        """About what a search takes that finds nothing."""
        return COST_SECONDS + COST_STEPS * self.step_seconds

    def _seconds_left(self) -> float | None:
        total = self.loop.total_steps
        return None if total is None else (total - self.loop.num_steps) * self.step_seconds

    def _is_early(self) -> bool:
        """Would a script that ends about now have paid for more than it could get?"""
        if len(self._step_seconds) < WARM_STEPS:
            return True
        elapsed = time.perf_counter() - self._first
        return self.loop.total_steps is None and elapsed < PATIENCE * self._cost_seconds

    def _is_late(self) -> bool:
        """Is so little left of a loop, whose length is known, that a search could hardly pay?"""
        left = self._seconds_left()
        return left is not None and left < WORTH * self._cost_seconds

    def _given(self, proof: Proof, given: dict[str, dict[str, Any]]) -> Plan:
        plan = Plan.from_dict(given)
        verdict = proof.judge(plan)
        self._note(plan, "given", verdict)
        if not verdict.kept:
            self.reason = f"the plan is not kept here: {verdict.reason}"
            return Plan()
        self.verdicts = [verdict]
        return plan

    def _search(self, proof: Proof) -> Generator[Wish, Any, Plan]:
        """Add to the plan what makes it faster, what promises most on copies of the step first."""
        base, done = Plan(), {Plan()}
        for group in self._ranked(proof):
            plan = adding(base, group)
            if plan in done:
                continue
            done.add(plan)
            verdict = proof.judge(plan)
            if not verdict.kept:
                self._note(plan, "not_kept", verdict)
                continue
            comparison = yield from self._compare(base, plan)
            self._note(plan, "faster" if comparison.faster else "not_faster", verdict, comparison)
            if comparison.faster:
                self._confirms = bool(base.techniques)
                self.comparison = self.comparison or comparison  # of the first addition, until confirmed
                self.verdicts, base = [verdict], plan
                self._adopt(plan, comparison)
        if not base.techniques:
            self.reason = "nothing that could be tried was faster and the same"
        return base

    def _ranked(self, proof: Proof) -> list[list[Technique]]:
        """The groups that can act, the fastest on copies of the step first, without what is much slower."""
        plans = {adding(Plan(), group): group for group in additions(self.root, self.machine)}
        able: list[Plan] = []
        for plan in plans:
            try:
                proof.replay(plan, ordered=False)
                able.append(plan)
            except Refused as refused:
                self._note(plan, str(refused))
            except CannotKeep:
                raise
            except Exception as error:
                self._note(plan, f"the model fails under it: {type(error).__name__}: {error}")
        rounds = 1 if self.step_seconds > LONG_STEP_SECONDS else 3
        found = [{p: proof.replay(p, ordered=False) for p in (self.reference, *able)} for _ in range(rounds)]
        wall = {plan: min(each[plan].wall_seconds for each in found) for plan in found[0]}
        cpu = {plan: max(1e-9, min(each[plan].cpu_seconds for each in found)) for plan in found[0]}
        times = {plan: wall[self.reference] / wall[plan] for plan in able}
        if self.device.type == "cpu":  # whom others disturb is not hopeless
            times = {plan: max(times[plan], cpu[self.reference] / cpu[plan]) for plan in able}
        for plan, ratio in times.items():
            if ratio < HOPELESS:
                self._note(plan, f"{ratio:.2f}x on a copy of the step")
        hopeful = [plan for plan in able if times[plan] >= HOPELESS]
        hopeful.sort(key=lambda plan: times[plan] / (1.0 + PRECISION_COSTS * _lowers(plan)), reverse=True)
        return [plans[plan] for plan in hopeful]

    def _compare(self, base: Plan, plan: Plan) -> Generator[Wish, Any, Comparison]:
        steps = length(self.step_seconds, SEGMENT_SECONDS)
        pairs: list[Pair] = []
        before = yield Segment(base, steps)
        while True:
            here = yield Segment(plan, steps, settling=1 if pairs else 2)
            after = yield Segment(base, steps)
            pairs.append(Pair(middle(before, after), here))
            before = after
            if len(pairs) in LOOKS:
                found = compared(pairs, by_processor=self.device.type == "cpu")
                if found.faster or found.is_futile or len(pairs) == LOOKS[-1]:
                    return found

    def _adopt(self, plan: Plan, comparison: Comparison) -> None:
        self.plan = plan
        plan.save(Path(self.loop.errand.folder) / PLAN)
        self._record("adopted", {"plan": plan.to_dict(), "step": self.loop.num_steps, **_told(comparison)})

    def _confirmed(self, plan: Plan) -> Course:
        """Time a plan that was put together, or given, beside the script as it is."""
        self.comparison = yield from self._compare(self.reference, plan)
        if self.comparison.faster:
            self._adopt(plan, self.comparison)
        else:
            self._take_back(f"{plan} was not faster than the run as it is ({_shown(self.comparison)})")

    def _stay(self) -> None:
        """The script goes on as it is."""
        self.plan = Plan()
        self._segment, self._wished = None, self.reference
        self._act(self.reference)

    def _watch(self) -> Course:
        """Let it act; from time to time prove it and time it again, and take it back where either fails."""
        wait = WATCH_STEPS
        while self.plan.techniques:
            yield Segment(self.plan, wait, 0)
            if self.loop.own_seconds > OWN_SHARE * (time.perf_counter() - self.loop.began):
                continue
            wait = min(2 * wait, MOST_WATCH_STEPS)
            kept = yield KEEP
            verdict = Proof(kept, self.machine).judge(self.plan)
            del kept
            self.verdicts.append(verdict)
            self._record("watched", {"step": self.loop.num_steps, **verdict.to_dict()})
            if not verdict.kept:
                self._take_back(f"its step is no longer the same: {verdict.reason}")
                return
            yield from self._time_again()

    def _time_again(self) -> Course:
        steps = length(self.step_seconds, 2 * SEGMENT_SECONDS)
        assert self.comparison is not None
        pairs = list(self.comparison.pairs)
        before = yield Segment(self.reference, steps)
        for _ in range(3):
            here = yield Segment(self.plan, steps)
            after = yield Segment(self.reference, steps)
            pairs.append(Pair(middle(before, after), here))
            before = after
        self.comparison = compared(pairs[-WATCHED_PAIRS:], by_processor=self.comparison.by_processor)
        self._record("timed", {"step": self.loop.num_steps, **_told(self.comparison)})
        if self.comparison.slower:
            self._take_back(f"it became slower ({_shown(self.comparison)})")

    def _take_back(self, reason: str) -> None:
        self.reason = reason
        self._record("taken_back", {"plan": self.plan.to_dict(), "reason": reason})
        if self.loop.errand.plan is None:  # a given plan is the person's
            (Path(self.loop.errand.folder) / PLAN).unlink(missing_ok=True)
        self._stay()

    def _note(
        self, plan: Plan, answer: str, verdict: Verdict | None = None, comparison: Comparison | None = None
    ) -> None:
        told = _told(comparison) if comparison is not None else {}
        entry = {"plan": plan.to_dict(), "answer": answer, "step": self.loop.num_steps, **told}
        entry |= {"verdict": verdict.to_dict()} if verdict is not None else {}
        self.tried.append(entry)
        self._record("tried", entry)

    def _record(self, kind: str, document: dict[str, Any]) -> None:
        self.ledger.append(kind, {"process": os.getpid(), **document})


def _lowers(plan: Plan) -> bool:
    return any(technique.card.stage == Stage.PRECISION for technique in plan.techniques)


def _random_states(device: torch.device) -> list[torch.Tensor]:
    """Torch's own: what a model draws its masks and noise from."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _set_random_states(states: list[torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state, device)


def _told(comparison: Comparison) -> dict[str, Any]:
    def ratio(found: Ratio) -> dict[str, float]:
        return {"estimate": found.estimate, "low": found.low, "high": found.high}

    pairs = [[p.reference.wall, p.plan.wall, p.reference.cpu, p.plan.cpu] for p in comparison.pairs]
    return {"wall": ratio(comparison.wall), "cpu": ratio(comparison.cpu), "pairs": pairs}


def _shown(comparison: Comparison) -> str:
    ratio = comparison.wall
    return f"{ratio.estimate:.2f}x, {ratio.low:.2f}-{ratio.high:.2f}"
