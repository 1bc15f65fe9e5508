"""The child's side of verification: reference, shadows and plan, in lockstep and along a course."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from vivace.engine.opening import call, checked_step, first_batches, seed_everything, start
from vivace.engine.order import ordered
from vivace.engine.session import Session
from vivace.job import Job
from vivace.machine import Machine
from vivace.plan import Plan
from vivace.surgery import tensors
from vivace.technique import Numerics, Stage
from vivace.verify.displacement import Outcome, State, distances, identical, mean_outcome, resolution
from vivace.verify.judgement import LIMIT, band, check, curve_check, outright, root_mean_square, summary
from vivace.verify.shadow import Rounding
from vivace.verify.states import (
    Snapshot,
    clone,
    decay_of,
    evaluate,
    random_state,
    repeatable,
    restore,
    state_of,
)

# Shadows round no finer than this: at fp32's last bit it is a rare event that a ReLU flips, which few shadows
# show, and sums in another order differ by many roundings.
FINEST_ROUNDOFF = 2.0**-16
SETTLING_STEPS = 8


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much to run: shadow seeds, snapshots, lockstep steps from each, and steps of the whole course."""

    seeds: int = 8
    snapshots: int = 3
    lockstep: int = 3
    course: int = 24
    course_seeds: int = 4

    def seconds(self, step_seconds: float) -> float:
        """About how long it takes; a shadow step costs about twice a plain one."""
        shadows = self.seeds * self.snapshots * self.lockstep + self.course_seeds * self.course
        plain = 2 * (self.snapshots * self.lockstep + self.course)
        return step_seconds * (2 * shadows + plain)

    @classmethod
    def within(cls, seconds: float | None, step_seconds: float) -> Effort:
        """The largest effort that fits into `seconds`, else the smallest there is."""
        small = [cls(8, 2, 2, 8, 3), cls(6, 2, 2, 6, 2), cls(5, 2, 1, 4, 2)]
        efforts = [cls(), cls(course=12, course_seeds=3), *small]
        fitting = (e for e in efforts if seconds is None or e.seconds(step_seconds) <= seconds)
        return next(fitting, efforts[-1])


@dataclasses.dataclass
class Ground:
    """What a plan is held against: the reference's outcomes and course, and an envelope for each distance."""

    references: list[Outcome]
    envelopes: list[dict[str, float]]
    curve: list[float]
    end: State
    widths: list[float]
    end_envelope: float


class Ruler:
    """Serves `vivace.engine.launch.Child`: verifies plans of one job; keeps reference and shadows."""

    def __init__(self, job: Job, machine: dict[str, Any]) -> None:
        self.job = job
        self.machine = Machine.from_dict(machine)
        self.effort = Effort()
        self.batches: list[Any] = []
        self.snapshots: list[Snapshot] = []
        self.grounds: dict[tuple[float, bool], Ground] = {}
        self.repeats = False  # are the algorithms now such that give equal bits every time?

    def prepare(self, seconds: float | None = None) -> dict[str, Any]:
        """Run the reference once, with snapshots at start, middle and late; `seconds` bound the effort."""
        begin = time.perf_counter()
        seed_everything(0)
        self.batches = first_batches(call(self.job, "data"), self.effort.course)
        with start(self.job, Plan(), self.machine) as trial:
            checked_step(trial, clone(self.batches[0]))
            before = time.perf_counter()
            self._step(trial, 0)
            self.effort = effort = Effort.within(seconds, time.perf_counter() - before)
        self.session = start(self.job, Plan(), self.machine)
        self.evaluation_batch = self.session.place(self.batches[-1])
        last = max(0, effort.course - effort.lockstep)
        marks = {round(i * last / max(1, effort.snapshots - 1)) for i in range(effort.snapshots)}
        torch.manual_seed(1)
        self.curve = []
        for position in range(effort.course):
            if position in marks:
                optimizers = [copy.deepcopy(o.state_dict()) for o in self.session.optimizers]
                decay = decay_of(self.session)
                self.snapshots.append(Snapshot(state_of(self.session), optimizers, position, decay))
            self.curve.append(self._step(self.session, position))
        self.end = state_of(self.session)
        self.references = self._locksteps(self.session)
        return {"seconds": time.perf_counter() - begin, "batches": len(self.batches)}

    def judge(self, plan: dict[str, Any]) -> dict[str, Any]:
        """Run a plan in lockstep and along the course; return the verdict's document (see `Verdict`)."""
        loaded = Plan.from_dict(plan)
        compiled = any(technique.card.stage == Stage.COMPILE for technique in loaded.techniques)
        device = self.session.build.device
        if device.type == "cuda" and loaded.promise == Numerics.EXACT and not self.repeats:
            return self._judge_repeatably(plan)
        with _equal_random_streams(compiled), start(self.job, loaded, self.machine) as session:
            fed_alike = self._fed_alike(session)
            for position in range(SETTLING_STEPS if session.build.kept else 0):
                self._step(session, position)  # a loss scale halves until it fits, and skips steps meanwhile
            promise, roundoff = session.promise, max(session.build.unit_roundoff, FINEST_ROUNDOFF)
            outcomes = self._locksteps(session)
            curve, end = self._course(session)
            pairs = list(zip(outcomes, self.references, strict=True))
            same_streams = all(torch.equal(o.random_state, r.random_state) for o, r in pairs)
            silent = any(r.drew and not o.drew for o, r in pairs)
            if not (same_streams or silent or promise == Numerics.EXACT):
                outcomes = [self._mean_lockstep(session, s, 50) for s in self.snapshots]
                curve, end = self._mean_course(session, 50)
        for outcome in outcomes:
            outcome.outputs = outcome.outputs if len(outcome.outputs) else self._evaluate(outcome.after)
        document: dict[str, Any] = {
            "promise": promise.name.lower(),
            "steps": self.effort.course + self.effort.lockstep * len(self.snapshots),
            "seeds": self.effort.seeds,
            "curves": {"steps": list(range(len(curve))), "reference": self.curve, "plan": curve},
        }
        if not fed_alike:
            return {**document, **outright(False, "it feeds other batches, or in another order", "batches")}
        note = ""
        if promise == Numerics.EXACT:
            different = self._different(outcomes, curve)
            if not (
                different and self._different(self._locksteps(self.session), *self._course(self.session))
            ):
                reason = f"promised to be bit-identical, and {different[0]} is not" if different else ""
                return {**document, **outright(not different, reason, "bit-identical")}
            note = "the job does not repeat itself bit for bit here, so that only rounding can be judged"
        if silent:
            reason = "the plan draws no random numbers where the job draws some: dropout or noise is off"
            return {**document, **outright(False, reason, "random numbers drawn")}
        return {**document, **self._compare(outcomes, curve, end, roundoff, same_streams, note)}

    def _judge_repeatably(self, plan: dict[str, Any]) -> dict[str, Any]:
        """Judge bits where the algorithms of plan and reference repeat theirs; a GPU's fastest do not."""
        fast = self.references, self.curve, self.end
        self.repeats = True
        try:
            with repeatable(True):
                self.references = self._locksteps(self.session)
                self.curve, self.end = self._course(self.session)
                return self.judge(plan)
        finally:
            self.repeats = False
            self.references, self.curve, self.end = fast

    def _different(self, outcomes: list[Outcome], curve: list[float], _: Any = None) -> list[str]:
        """What is not bit-identical to the reference."""
        pairs = zip(outcomes, self.references, strict=True)
        different = [name for outcome, reference in pairs for name in identical(outcome, reference)]
        return different + (["loss curve"] if curve != self.curve else [])

    def _fed_alike(self, session: Session) -> bool:
        """Do the plan's data techniques give the batches that the job's own loader gives?"""
        if not any(technique.card.stage == Stage.DATA for technique in session.plan.techniques):
            return True
        mine, theirs = (
            [
                tensor.cpu()
                for batch in itertools.islice(feed(ordered(call(self.job, "data"), seed=0, epoch=0)), 3)
                for tensor in tensors(batch)
            ]
            for feed in (session.batches, iter)
        )
        return len(mine) == len(theirs) and all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))

    def _compare(
        self,
        outcomes: list[Outcome],
        curve: list[float],
        end: State,
        roundoff: float,
        same_streams: bool,
        note: str,
    ) -> dict[str, Any]:
        ground = self._ground(roundoff, same_streams)
        checks = []
        for index, (outcome, snapshot) in enumerate(zip(outcomes, self.snapshots, strict=True)):
            values = self._distances(outcome, snapshot, ground.references[index])
            envelopes = ground.envelopes[index]
            checks += [check(k, snapshot.position, v, envelopes[k], roundoff) for k, v in values.items()]
        checks.append(curve_check(curve, ground.curve, ground.widths))
        apart = self._apart(end, ground.end)
        checks.append(check("displacement of the course", 0, apart, ground.end_envelope, roundoff))
        if not same_streams:
            note = note or f"random streams differ: means over {self.effort.seeds} seeds were compared"
        low = [a - LIMIT * w for a, w in zip(ground.curve, ground.widths, strict=True)]
        high = [a + LIMIT * w for a, w in zip(ground.curve, ground.widths, strict=True)]
        steps = list(range(len(curve)))
        curves = {"steps": steps, "reference": ground.curve, "plan": curve, "low": low, "high": high}
        return {**summary(checks, note), "curves": curves}

    def _ground(self, roundoff: float, same_streams: bool) -> Ground:
        """The envelope: shadows of this roundoff, with the reference's random streams or with others.

        Where streams differ, means over seeds are compared: one shadow's distance from a mean over n seeds is
        sqrt((n + 1) / 2) times that of another mean over n seeds.
        """
        key = (roundoff, same_streams)
        if key in self.grounds:
            return self.grounds[key]
        effort, session = self.effort, self.session
        if same_streams:
            references, curve, end = self.references, self.curve, self.end
        else:
            references = [self._mean_lockstep(session, s, 20) for s in self.snapshots]
            curve, end = self._mean_course(session, 20)
        envelopes = []
        for index, snapshot in enumerate(self.snapshots):
            runs = []
            for seed in range(effort.seeds):
                noise = Rounding(roundoff, seed=100 * index + seed)
                stream = index if same_streams else 80 + seed
                outcome = self._lockstep(session, snapshot, stream=stream, noise=noise)
                runs.append(self._distances(outcome, snapshot, references[index]))
            scale = 1.0 if same_streams else math.sqrt(2 / (effort.seeds + 1))
            smallest = resolution(references[index], snapshot.state)
            spread = {name: scale * root_mean_square([run[name] for run in runs]) for name in runs[0]}
            envelopes.append({name: max(value, smallest.get(name, 0.0)) for name, value in spread.items()})
        courses, ends = [], []
        for seed in range(effort.course_seeds):
            noise = Rounding(roundoff, seed=9000 + seed)
            shadow, shadow_end = self._course(session, stream=1 if same_streams else 80 + seed, noise=noise)
            courses.append(shadow)
            ends.append(self._apart(shadow_end, end))
        scale = 1.0 if same_streams else math.sqrt(2 / (effort.course_seeds + 1))
        widths = band(curve, courses, scale)
        ground = Ground(references, envelopes, curve, end, widths, scale * root_mean_square(ends))
        self.grounds[key] = ground
        return ground

    def _distances(self, outcome: Outcome, snapshot: Snapshot, reference: Outcome) -> dict[str, float]:
        return distances(outcome, reference, snapshot.state, snapshot.decay, self.effort.lockstep)

    def _apart(self, end: State, reference: State) -> float:
        """The distance between two ends of the course, as a fraction of the reference's way."""
        begin, mine, theirs = self.snapshots[0].state.parameters, end.parameters, reference.parameters
        gap = sum(float((mine[name] - t).double().square().sum()) for name, t in theirs.items())
        way = sum(float((t - begin[name]).double().square().sum()) for name, t in theirs.items())
        return math.sqrt(gap / way) if way else math.inf if gap else 0.0

    def _step(self, session: Session, position: int) -> float:
        loss = session.step(clone(self.batches[position % len(self.batches)]))
        return float(torch.as_tensor(loss).detach())

    def _locksteps(self, session: Session) -> list[Outcome]:
        return [self._lockstep(session, s, stream=index) for index, s in enumerate(self.snapshots)]

    def _lockstep(
        self,
        session: Session,
        snapshot: Snapshot,
        *,
        stream: int,
        noise: AbstractContextManager[Any] | None = None,
    ) -> Outcome:
        """A few steps from a snapshot; outputs in evaluation mode only for the reference's own session."""
        restore(session, snapshot)
        torch.manual_seed(stream)
        before = random_state(session.build.device)
        with noise or nullcontext():
            losses = [self._step(session, snapshot.position + i) for i in range(self.effort.lockstep)]
        streams, after = random_state(session.build.device), state_of(session)
        outputs = self._evaluate(after) if session is self.session else torch.empty(0)
        return Outcome(losses, after, outputs, streams, drew=not torch.equal(before, streams))

    def _mean_lockstep(self, session: Session, snapshot: Snapshot, stream: int) -> Outcome:
        return mean_outcome(
            [self._lockstep(session, snapshot, stream=stream + seed) for seed in range(self.effort.seeds)]
        )

    def _course(
        self, session: Session, *, stream: int = 1, noise: AbstractContextManager[Any] | None = None
    ) -> tuple[list[float], State]:
        restore(session, self.snapshots[0])
        torch.manual_seed(stream)
        with noise or nullcontext():
            curve = [self._step(session, position) for position in range(self.effort.course)]
        return curve, state_of(session)

    def _mean_course(self, session: Session, stream: int) -> tuple[list[float], State]:
        runs = [self._course(session, stream=stream + seed) for seed in range(self.effort.course_seeds)]
        curve = [sum(values) / len(values) for values in zip(*(run[0] for run in runs), strict=True)]
        return curve, State.mean([run[1] for run in runs])

    def _evaluate(self, state: State) -> torch.Tensor:
        return evaluate(self.session, self.job, state, self.evaluation_batch)


def _equal_random_streams(compiled: bool) -> AbstractContextManager[Any]:
    """Let compiled code draw the random numbers that eager code draws."""
    if not compiled:
        return nullcontext()
    from torch._inductor import config

    patched: AbstractContextManager[Any] = config.patch(fallback_random=True)
    return patched
