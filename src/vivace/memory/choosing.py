"""The plan that fits a memory budget: the cheapest decisions for the blocks, checked by a measured step."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from vivace import words
from vivace.errors import AnswerIsNo, Refused
from vivace.job import Batch, Job
from vivace.machine import Machine
from vivace.memory.costs import measure
from vivace.memory.planner import KEEP, Choice, Decision, decide, pareto, smallest
from vivace.observing.observe import now, observe
from vivace.plan import Plan
from vivace.session.opening import call, first_batches, readable, start
from vivace.session.session import Session
from vivace.technique import Numerics, Technique
from vivace.technique.registry import find, lowering_the_peak, rescues, savers
from vivace.tensors.trees import Again

ATTEMPTS = 5
STEPS = 5


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A plan whose measured peak is within the budget.

    `curve` holds (bytes at the peak, seconds a step more than keeping everything), smallest first; it rests
    on the blocks' own costs, `peak_bytes` on a measured step. `step_seconds` is of a step that keeps all.
    """

    plan: Plan
    base: Plan
    decision: Decision
    peak_bytes: int
    kept_bytes: int
    step_seconds: float
    curve: list[tuple[int, float]]

    @property
    def expected_seconds(self) -> float:
        """Of a step under the plan, by the blocks' own costs."""
        return self.step_seconds + self.decision.seconds

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types, to cross to the parent process."""
        named = {key: value for key, value in vars(self).items() if key not in ("decision", "base")}
        return {**named, "plan": self.plan.to_dict(), "seconds": self.decision.seconds}


def choose(
    job: Job,
    machine: Machine,
    budget_bytes: int,
    allow: Numerics = Numerics.EXACT,
    base: Plan | None = None,
    *,
    largest: Sequence[Any] = (),
    seconds: float = math.inf,
) -> Chosen:
    """The cheapest decisions for the job's blocks under which a step's peak is within `budget_bytes`.

    Each kind of block is timed alone, forward and backward, under each decision. The chosen plan's peak is
    measured, on `largest` where batches differ, and where it is not as expected the choice is made again
    with as much less or more room. What helps beside the blocks is tried below them until
    `seconds` are over; the fastest that fits is returned. Raises AnswerIsNo with the smallest peak that is
    possible, and Refused where the model has no blocks.
    """
    batches = [*first_batches(readable(call(job, "data"), job), 2), *largest]
    return cheapest(choosers(job, machine, batches, allow, base or Plan()), budget_bytes, seconds)


def cheapest(choosers: Iterable[Chooser], budget_bytes: int, seconds: float = math.inf) -> Chosen:
    """The fastest of what the choosers find, of which none is asked after `seconds`. Raises TooLittle."""
    begin = time.monotonic()
    best: Chosen | None = None
    refusals: list[TooLittle] = []
    for chooser in choosers:
        try:
            if best is None or chooser.step_seconds < best.expected_seconds:
                chosen = chooser.choose(budget_bytes)
                best = min(best or chosen, chosen, key=lambda each: each.expected_seconds)
        except TooLittle as refusal:
            refusals.append(refusal)
        except Exception:
            if best is None and not refusals:  # the job's own fault; else a relief that fails here is none
                raise
        if time.monotonic() - begin > seconds:
            break
    if best is None:
        raise min(refusals, key=lambda refusal: refusal.smallest_bytes)
    return best


class TooLittle(AnswerIsNo):
    """No decisions fit; `smallest_bytes` is the smallest peak that was measured."""

    def __init__(self, message: str = "", *, smallest_bytes: int = 0) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


def choosers(
    job: Job, machine: Machine, batches: Sequence[Any], allow: Numerics, base: Plan
) -> Iterator[Chooser]:
    """One on `base`, and one for each relief that acts on this job and is allowed."""
    again = [Again(batch) for batch in batches]
    first = Chooser(job, machine, again, allow, base)
    yield first
    for techniques in _reliefs(machine.device.kind, allow):
        plan = base
        for technique in techniques:
            plan = plan.adding(technique)
        if plan.promise > allow or len(plan) < len(base) + len(techniques):
            continue
        with contextlib.suppress(Exception):  # what is refused or fails on this job is no relief
            yield Chooser(job, machine, again, allow, plan, first)


def _reliefs(device: str, allow: Numerics) -> list[list[Technique]]:
    """What lowers the peak beside decisions for blocks: what saves memory and does not decide on blocks, two
    settings of each; and what takes less room for other reasons, such as a layout of pictures with which a
    CPU's convolutions need no copies, or numbers of 16 bits: the least coarse also with what is exact, the
    others also with what is less coarse.
    """
    others = [cls for cls in savers(device, allow) if not cls.card.by_block]
    exact = [one for cls in others if cls.card.numerics == Numerics.EXACT for one in rescues(cls)[:2]]
    coarser = [one for cls in others if cls.card.numerics > Numerics.EXACT for one in rescues(cls)[:2]]
    smaller = [cls() for cls in lowering_the_peak(device, allow)]
    beside = []
    for at, one in enumerate(smaller):
        beside += [[one], *([one, other] for other in (smaller[:at] if at else exact))]
    return [*([one] for one in exact), *beside, *([one] for one in coarser)]


class Chooser:
    """What the parts of a job's step cost, measured once, and the decisions that follow from it.

    `rest` is what a step's peak holds beside the parts: weights, optimizer state, the batch; it is whatever
    makes the measured peak of a step come out.
    """

    def __init__(
        self,
        job: Job,
        machine: Machine,
        batches: Sequence[Again],
        allow: Numerics,
        base: Plan,
        first: Chooser | None = None,
    ) -> None:
        self.job, self.machine, self.batches, self.base = job, machine, list(batches), base
        with start(job, base, machine) as session:
            if session.promise > allow:
                raise Refused(f"on this job it promises {session.promise.name}, and {allow.name} is allowed")
            self.parts = measure(session, batches[-1](), allow)
            self.kept_bytes = observe(session, [again() for again in self.batches]).peak_bytes
            self.step_seconds = self._step_seconds(session, first)
        if not self.parts:
            raise Refused("no part of the model is repeated, and no nn.Sequential can be cut")
        self.options = [part.options for part in self.parts]
        keeping = [options[:1] for options in self.options]
        self.rest = self.kept_bytes - smallest(keeping).peak_bytes

    def choose(self, budget_bytes: int) -> Chosen:
        """The cheapest plan whose measured peak is within the budget. Raises AnswerIsNo."""
        measured: dict[tuple[Choice, ...], int] = {}
        best: Decision | None = None
        for _ in range(ATTEMPTS):
            decision = self.decide(budget_bytes)
            if decision.names in measured:
                break
            peak = measured[decision.names] = self.peak_bytes(decision)
            self.rest = peak - decision.peak_bytes
            if peak <= budget_bytes and (best is None or decision.seconds < best.seconds):
                best = decision
        if best is None:
            least = min(self.kept_bytes, *measured.values())  # decisions may cost more than they spare
            raise TooLittle(
                f"no decisions for the blocks bring the peak to {words.size(budget_bytes)}; the smallest "
                f"measured is {words.size(least)}",
                smallest_bytes=least,
            )
        peak = measured[best.names]
        plan, curve = self.plan(best), self.curve()
        return Chosen(plan, self.base, best, peak, self.kept_bytes, self.step_seconds, curve)

    def decide(self, budget_bytes: int) -> Decision:
        """The cheapest decisions that are expected to fit, or those with the smallest peak where none is."""
        try:
            return decide(self.options, budget_bytes - self.rest)
        except AnswerIsNo:
            return smallest(self.options)

    def plan(self, decision: Decision) -> Plan:
        """The base plan with the techniques that carry out a decision."""
        return plan_of(decision, [part.name for part in self.parts], self.base)

    def peak_bytes(self, decision: Decision) -> int:
        """The measured peak of a step."""
        with start(self.job, self.plan(decision), self.machine) as session:
            return observe(session, [again() for again in self.batches]).peak_bytes

    def curve(self) -> list[tuple[int, float]]:
        """Memory against time: (bytes at the peak, seconds a step more), smallest first."""
        return [(self.rest + d.peak_bytes, d.seconds) for d in pareto(self.options)]

    def _step_seconds(self, session: Session, first: Chooser | None) -> float:
        """Seconds of a step; against those of the first chooser's, in turns, where both fit on the device."""
        others = [session]
        with contextlib.ExitStack() as stack:
            if first is not None and session.build.device.type == "cpu":
                others.append(stack.enter_context(start(self.job, first.base, self.machine)))
            times = [[_seconds(each, self.batches[0]()) for each in others] for _ in range(1 + STEPS)][1:]
        if first is None or len(others) < 2:
            return statistics.median(own for own, *_ in times)
        return first.step_seconds * statistics.median(own / other for own, other in times)


def _seconds(session: Session, batch: Batch) -> float:
    begin = now(session.build.device)
    session.step(batch)
    return now(session.build.device) - begin


def plan_of(decision: Decision, names: list[str], base: Plan) -> Plan:
    """`base` with the techniques that carry out a decision for the parts called `names`."""

    def chosen(technique: str, *words: str) -> tuple[str, ...]:
        wanted = {Choice(technique, word) for word in words}
        found = tuple(name for name, choice in zip(names, decision.names, strict=True) if choice in wanted)
        return ("*",) if len(found) == sum(map(bool, names)) else found

    plan = base
    for technique in dict.fromkeys(choice.technique for choice in decision.names if choice != KEEP):
        plan = plan.adding(find(technique).deciding(partial(chosen, technique)))
    return plan
