"""The course of a search on a script's own steps: what is proven, timed, adopted, watched and taken back.

It is a generator of wishes: for segments of steps, for a step to be kept, or for steps to pass. The script's
objects are touched only where the conductor grants them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from vivace.errors import VivaceError
from vivace.inspection import inspect
from vivace.ledger import Ledger
from vivace.live.candidates import (
    EACH_COMPILES,
    EACH_COSTS,
    PRECISION_COSTS,
    adding,
    additions,
    convolves,
    later,
    of_memory_alone,
    own_settings,
)
from vivace.live.compiling import PASSING_SHARE, Compiling
from vivace.live.copies import times_on_copies
from vivace.live.errand import LEDGER, PLAN
from vivace.live.kept import CannotKeep, Kept
from vivace.live.pairs import LOOKS, Comparison, Pair, Pause, Segment, compared, length, middle
from vivace.live.proof import Proof, Verdict, left_to_the_original
from vivace.live.refusals import device_of
from vivace.live.spending import SHARE
from vivace.measuring.statistics import EARLY, LAST
from vivace.plan import Plan
from vivace.technique import Numerics, Technique
from vivace.tensors.modules import untouched
from vivace.words import duration

if TYPE_CHECKING:
    from vivace.live.loop import Loop

SEGMENT_SECONDS = 0.12
LONG_STEP_SECONDS = (1.0, 0.1)  # with convolutions, without: in shorter ones the making of kernels shows
HOPELESS = 0.8  # times as fast, on a copy of the step: not tried on the script's own
MOMENT_SECONDS = 1.0  # until it is looked again whether more may be spent
WATCH_STEPS, MOST_WATCH_STEPS = 200, 20_000  # between two looks at a plan that was adopted, doubling
LATER = 1.05  # times as fast, on a copy: then it is tried what helps a model that was trained for a while
LATER_SECONDS = 60.0  # that a run on which nothing acts has left, for that to be looked at
WATCHED_PAIRS = 12  # of the newest, for the ratio
SOON_STEPS, SURE = 40, 1.1  # after so many a plan is timed again that may be less than so much faster
SEARCHED_STEPS = 20  # until the second proof, where nothing but the search is wanted
NOT_FASTER = "nothing that was tried is faster and trains the same model"
STARVING_SECONDS = 30.0  # after which, with no more to spend than at first, waiting ends
STARVED = "its steps are so short that watching them takes all the time that a search may take"
NOTHING_TO_TRY = "there was nothing to try"
NOTHING_PROMISED = "nothing promises enough, on copies of a step, to be tried on its own steps"
KEEP = object()
Wish = Segment | Pause | object
Wishes = Generator[Wish, Any, None]


class Course:
    """What has come of a search so far, and what it wishes next; `plan` is the one that is adopted.

    `root` and `rest` as for the conductor, who grants the wishes and counts the steps.
    """

    def __init__(self, loop: Loop, root: nn.Module, rest: str) -> None:
        self.loop, self.root = loop, root
        self.clock, self.spending = loop.clock, loop.spending
        self.device, self.machine = device_of(root), inspect()
        self.plan, self.reference = Plan(), Plan()
        self.comparison: Comparison | None = None  # of the adopted plan with the script as it is
        self._confirms = True  # is that still to be timed?
        together = loop.ranks is not None
        self.own = own_settings(loop.seen, root, loop.page_faults, rest, together=together)
        self.compiling = Compiling(self.own)
        self.later = None if together or self.spending.is_free else later(root)
        self.tried: list[dict[str, Any]] = []
        self.verdicts: list[Verdict] = []  # on the adopted plan
        self.plan_seconds, self.plan_steps = 0.0, 0  # of steps under the adopted plan
        self.inexact_steps = 0  # on which any plan acted that may change numbers
        self.inexact: dict[str, None] = {}  # what those plans hold that may, in their order
        self.saved_before = 0.0  # seconds, at least, by parts of that plan
        self.reason = ""  # why nothing acts
        self.is_settled = False  # has the search ended?
        self.ledger = Ledger(Path(loop.errand.folder) / LEDGER)
        self.seconds_of_hooks = 0.0  # of a step that only passes by

    @property
    def step_seconds(self) -> float:
        """The median of the newest steps."""
        return self.loop.median_seconds

    def stepped(self, seconds: float | None, plan: Plan) -> None:
        """A step is over that `plan` acted on; None for the seconds of one unlike the others."""
        if seconds is not None:
            self.loop.step_seconds.append(seconds)
        if plan is self.plan and plan.techniques:
            self.plan_steps += 1
            self.plan_seconds += self.step_seconds if seconds is None else seconds
        if names := [one.name for one in plan.techniques if one.card.numerics > Numerics.EXACT]:
            self.inexact_steps += 1
            self.inexact |= dict.fromkeys(names)

    def dropped(self, reason: str) -> None:
        """Nothing acts any more, for a reason of the script's."""
        self.reason = reason
        self._record("dropped", {"plan": self.plan.to_dict(), "reason": reason})
        self.plan = Plan()

    def wishes(self) -> Wishes:
        """One after the other, until there is nothing more to do.

        A Segment is answered by its Timing, KEEP by the step that was kept.
        """
        cost = yield from self._sought()
        self.is_settled = True
        wait = left = WATCH_STEPS
        while not self.plan.techniques and (self._may_help_later or self._will_compile):
            if self.spending.compiles(self.compiling.seconds):
                cost = yield from self._compiled()
            elif self.seconds_of_hooks > PASSING_SHARE * self.step_seconds:
                return
            else:
                yield Pause(self.plan, WATCH_STEPS)
                left -= WATCH_STEPS
            if left <= 0 and self._may_help_later:
                wait = left = min(2 * wait, MOST_WATCH_STEPS)
                cost = yield from self._seen_again(cost)
        if self.plan.techniques:
            yield from self._watch(cost)

    @property
    def _will_compile(self) -> bool:
        return self.spending.will_compile(self.compiling.seconds)

    @property
    def _may_help_later(self) -> bool:
        return self.later is not None and self.loop.seconds_left >= LATER_SECONDS

    def _sought(self) -> Generator[Wish, Any, float]:
        """Adopt what is given or found; returns about the seconds of a proof."""
        given = self.loop.errand.plan
        proof = self._proof((yield KEEP))
        plan = (yield from self._search(proof)) if given is None else self._given(proof, given)
        if given is None:
            self.compiling.foretell(proof, self.spending)
        cost = proof.end(plan)
        if plan.techniques and self._confirms:
            yield from self._confirmed(plan)
        return cost

    def _proof(self, kept: Kept) -> Proof:
        """Raises CannotKeep where what runs again is the script's own."""
        with untouched(self.root) as changed:
            proof = Proof(kept, self.machine, self.clock)
        if changed:
            raise CannotKeep(left_to_the_original(changed[0]))
        return proof

    def _afforded(self, seconds: float) -> Wishes:
        """Let steps pass until so much may be spent, or as much less as steps have become shorter."""
        begin, spent, first = self.clock.wall(), self.spending.spent, self.loop.copy_seconds
        lacked = self.spending.lacks(seconds, first)
        while True:
            a_copy = self.loop.copy_seconds
            needed = seconds * min(1.0, a_copy / first) if first else seconds
            if self.spending.affords(needed, a_copy):
                return
            waited = self.clock.wall() - begin
            is_looking = self.spending.spent - spent >= SHARE * waited  # else it is given back meanwhile
            is_starved = waited >= STARVING_SECONDS and self.spending.lacks(needed, a_copy) >= lacked
            if is_starved and is_looking and not self.plan.techniques:  # a plan that acts is kept
                raise CannotKeep(STARVED)
            yield self._a_moment()

    def _a_moment(self) -> Pause:
        steps = round(MOMENT_SECONDS / max(self.step_seconds, 1e-6))  # 0 s where none was like the others
        return Pause(self.plan, max(1, min(WATCH_STEPS, steps)))

    def _worth(self, plan: Plan, ratio: float | None, seconds: float) -> Generator[Wish, Any, bool]:
        """Let steps pass until so much may be spent on a plan, whose copy of a step is so many times as fast,
        where that is known; False as soon as too few are left for that to pay.
        """
        moments = self._afforded(seconds)
        while self.spending.promises(ratio or 1.0, seconds, self.loop.seconds_left):
            moment = next(moments, None)
            if moment is None:
                return True
            yield moment
        shown = f"{ratio:.2f}x as fast on a copy of a step, " if ratio else ""
        self._note(plan, f"{shown}too little for the steps that are left")
        return False

    def _given(self, proof: Proof, given: dict[str, dict[str, Any]]) -> Plan:
        plan = Plan.from_dict(given)
        if plan.compiles and self.loop.ranks is not None:
            self._note(plan, EACH_COMPILES)
            self.reason = f"the plan is not kept here: {EACH_COMPILES}"
            return Plan()
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
        groups = additions(self.root, self.machine, self.own, proof.kept.differentiated)
        a_copy = self.loop.copy_seconds
        seconds = (1 + len(groups)) * a_copy  # of a round
        is_long = a_copy > LONG_STEP_SECONDS[not convolves(self.root)]
        rounds = 1 if is_long or not self.spending.will_afford(2 * seconds, a_copy) else 2
        yield from self._afforded(rounds * seconds)
        for group, ratio in (yield from self._ranked(proof, groups, rounds)):
            plan = adding(base, group)
            if plan in done:
                continue
            done.add(plan)
            verdict = None
            while verdict is None:
                seconds = proof.expected_seconds(plan)
                if not (yield from self._worth(adding(Plan(), group), ratio, seconds)):
                    break
                verdict = proof.judge_until(plan, self.spending.until(self.loop.copy_seconds))
            if verdict is not None:
                base = yield from self._tried(base, plan, verdict)
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
        if not base.techniques:
            self.comparison = comparison  # that of the first addition stays, until confirmed
        self._adopt(plan, comparison)
        return plan

    def _compiled(self) -> Generator[Wish, Any, float]:
        """Compile the model's call, and keep that where it is faster; about the seconds of a proof."""
        about, base, plan = self.compiling.seconds, self.plan, self.compiling.taken(self.plan)
        kept: Kept = yield KEEP
        begin = self.clock.wall()
        self.loop.say(f"compiling a copy of the model, once, for about {duration(about)}")
        proof = self._proof(kept)
        proof.may_compile = True
        until = self.spending.compiling_until(about + proof.expected_seconds(plan))
        verdict = proof.judge_until(plan, until)
        cost = proof.end(plan)
        self.spending.compiled(self.clock.wall() - begin)
        if verdict is None:
            self._note(plan, f"compiling it took far longer than {duration(about)}")
            return cost
        if (yield from self._tried(base, plan, verdict)) == plan and self._confirms:
            yield from self._confirmed(plan)
        return cost

    def _seen_again(self, cost: float) -> Generator[Wish, Any, float]:
        """Try what may help by now, where nothing acts; about the seconds of a proof, of which the last took
        `cost`.
        """
        yield from self._afforded(cost)
        proof = self._proof((yield KEEP))
        found = yield from self._helps_by_now(proof)
        cost = proof.end(self.plan)
        if found is not None:
            yield from self._tried(self.plan, *found)
        return cost

    def _helps_by_now(self, proof: Proof) -> Generator[Wish, Any, tuple[Plan, Verdict] | None]:
        """What makes a copy of the step faster by now, with its proof: not all does when training begins."""
        if self.later is None or self.later.name in self.plan.names:
            return None
        base, plan = self.plan, self.plan.adding(self.later)
        times, refused = yield from self._on_copies(proof, [plan, base] if base.techniques else [plan], 2)
        if plan in refused:
            self._note(plan, refused[plan])
            self.later = None
        if times.get(plan, 0.0) < LATER * times.get(base, 1.0):
            return None
        verdict = proof.judge_until(plan, self.spending.until(self.loop.copy_seconds))
        if verdict is not None and not verdict.kept:
            self.later = None  # what rounds too far on this model is not proven anew at each look
        return None if verdict is None else (plan, verdict)

    def _on_copies(
        self, proof: Proof, plans: list[Plan], rounds: int
    ) -> Generator[Wish, Any, tuple[dict[Plan, float], dict[Plan, str]]]:
        """What `times_on_copies` tells; before each plan steps pass until it may be run."""
        copies = times_on_copies(proof, plans, rounds)
        while True:
            try:
                next(copies)
            except StopIteration as ended:
                found: tuple[dict[Plan, float], dict[Plan, str]] = ended.value
                return found
            yield from self._afforded(rounds * max(self.loop.copy_seconds, proof.reference.wall_seconds))

    def _ranked(
        self, proof: Proof, groups: list[list[Technique]], rounds: int
    ) -> Generator[Wish, Any, list[tuple[list[Technique], float | None]]]:
        """The groups that can act, and how many times as fast copies of the step are under each, where copies
        can tell; the fastest first, without what is much slower.
        """
        for name, why in self.own.items():
            self.tried.append({"plan": {name: {}}, "answer": why, "step": self.loop.num_steps})
        plans = {adding(Plan(), group): group for group in groups}
        alone = list(filter(of_memory_alone, plans))  # only the script's own steps can tell
        times, refused = yield from self._on_copies(proof, [p for p in plans if p not in alone], rounds)
        for plan, reason in refused.items():
            self._note(plan, reason)
        for plan, ratio in times.items():
            if ratio < HOPELESS:
                self._note(plan, f"{ratio:.2f}x as fast on a copy of a step")
        hopeful = [plan for plan, ratio in times.items() if ratio >= HOPELESS] + alone
        prices = {p: 1.0 + PRECISION_COSTS * bool(p.precision) + EACH_COSTS * len(p) for p in hopeful}
        hopeful.sort(key=lambda p: -times.get(p, 1.0) / prices[p])
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
                wider = LAST if len(pairs) == LOOKS[-1] else EARLY
                found = compared(pairs, by_processor=self.device.type == "cpu", wider=wider)
                if found.faster or found.is_futile or len(pairs) == LOOKS[-1]:
                    return dataclasses.replace(found, beside=base.names)
            if len(pairs) > 2 and not self.spending.affords(0.0, self.loop.copy_seconds):
                yield from self._afforded(0.0)
                before = yield Segment(base, steps)

    def _adopt(self, plan: Plan, comparison: Comparison) -> None:
        if not self.plan.techniques:
            self.plan_steps = 0  # others were of a plan that was taken back
        elif plan != self.plan:
            self._count_saved()
        self.plan = plan
        plan.save(Path(self.loop.errand.folder) / PLAN)
        self._record("adopted", {"plan": plan.to_dict(), "step": self.loop.num_steps, **comparison.to_dict()})

    def _count_saved(self) -> None:
        """What the plan has saved so far, before it becomes another or is taken back."""
        if self.plan.techniques and self.comparison is not None:
            self.saved_before += self.plan_seconds * max(0.0, self.comparison.wall.low - 1.0)
            self.plan_seconds = 0.0

    def _confirmed(self, plan: Plan) -> Wishes:
        """Time a plan that was put together, or given, beside the script as it is."""
        comparison = yield from self._compare(self.reference, plan)
        self.comparison = comparison or self.comparison
        given = self.loop.errand.plan
        if comparison is not None and given is not None and plan == Plan.from_dict(given):
            self.tried[0] |= comparison.to_dict()  # which was "given"
        if comparison is not None and comparison.faster:
            self._adopt(plan, comparison)
            return
        shown = "much slower" if comparison is None else comparison.shown
        self._take_back(f"{plan} was not faster than the run as it is ({shown})")

    def _watch(self, cost: float) -> Wishes:
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
            before = self.spending.spent
            proof = self._proof((yield KEEP))
            verdict = None
            while verdict is None:
                yield from self._afforded(proof.expected_seconds(self.plan))
                verdict = proof.judge_until(self.plan, self.spending.until(self.loop.copy_seconds))
            found = (yield from self._helps_by_now(proof)) if verdict.kept else None
            proof.end(self.plan)
            cost = self.spending.spent - before
            self.verdicts.append(verdict)
            self._record("watched", {"step": self.loop.num_steps, **verdict.to_dict()})
            if not verdict.kept:
                self._take_back(f"its step is no longer the same: {verdict.reason}")
                return
            yield from self._time_again()
            if found is not None and self.plan.techniques:
                base, plan = self.plan, found[0]
                if (yield from self._tried(base, *found)) == plan and self._confirms:
                    yield from self._confirmed(plan)
            if self.plan.techniques and self.spending.compiles(self.compiling.seconds):
                cost = yield from self._compiled()
            if self.spending.is_free:
                return

    def _time_again(self) -> Wishes:
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
            if not self.spending.affords(0.0, self.loop.copy_seconds):
                yield from self._afforded(0.0)
                before = yield Segment(self.reference, steps)
        every = [*self.comparison.pairs, *pairs]
        self.comparison = compared(every[-WATCHED_PAIRS:], by_processor=by_processor, wider=LAST)
        self._record("timed", {"step": self.loop.num_steps, **self.comparison.to_dict()})
        if found.slower:
            self._take_back(f"it became slower ({found.shown})")
        elif len(pairs) == WATCHED_PAIRS and found.gains_nothing:
            self._take_back(f"its later steps are not faster ({found.shown})")

    def _take_back(self, reason: str) -> None:
        self.reason = reason
        self._record("taken_back", {"plan": self.plan.to_dict(), "reason": reason})
        self._count_saved()
        path, given = Path(self.loop.errand.folder) / PLAN, self.loop.errand.plan is not None
        with contextlib.suppress(VivaceError, OSError):
            if not given and Plan.load(path) == self.plan:  # neither a person's nor another process's
                path.unlink()
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
        self.loop.errand.make_way()
        self.ledger.append(kind, {"process": os.getpid(), **document})
