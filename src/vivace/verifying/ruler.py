"""The child's side of verification: reference, shadows and plan, in lockstep and along a course."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch

from vivace.plan import Plan
from vivace.session.opening import checked_step, seed_everything, start
from vivace.session.session import Session
from vivace.technique import Numerics
from vivace.tensors.modules import has_sparse_gradients
from vivace.tensors.trees import bytes_of
from vivace.torch_internals import compiler
from vivace.verifying.bias import FEWEST, estimates, spread_of
from vivace.verifying.bias import checks_of as bias_checks
from vivace.verifying.displacement import (
    Outcome,
    different_states,
    distances,
    identical,
    opened_otherwise,
    resolution,
    same_streams,
)
from vivace.verifying.effort import SHADOW_PAIRS, Effort
from vivace.verifying.evaluation import Evaluation
from vivace.verifying.evaluation import checks_of as evaluation_checks
from vivace.verifying.facts import difference, facts_of_session
from vivace.verifying.feeding import Fed, Reach, fed_otherwise, shared_otherwise, validated_otherwise
from vivace.verifying.figures import Measure, Quantity
from vivace.verifying.ground import Ground, Ran, Standing
from vivace.verifying.halves import Halves, Place
from vivace.verifying.judgement import (
    FAR,
    LAYER_LIMIT,
    LIMIT,
    band,
    check,
    curve_check,
    envelope_of,
    is_near,
    outright,
    root_mean_square,
    spread_check,
    summary,
    unknown,
    widened,
)
from vivace.verifying.life import WHEN, unseen
from vivace.verifying.life import checks_of as life_checks
from vivace.verifying.masks import Unlike
from vivace.verifying.rehearsal import checks_of, fault_of, same_rehearsals, slopes_like
from vivace.verifying.runner import PAIRS_STREAM, SETTLING_STEPS, Runner
from vivace.verifying.shadow import COARSER, COARSER_SEEDS, FINEST_ROUNDOFF, Products, Rounding
from vivace.verifying.states import InPython, Snapshot, clone, moving_only, repeatable, state_of, strides_of
from vivace.verifying.tap import Tap, every_random_state

MOST_RESUMED_BYTES = 2**30  # of parameters: a resumed session stands in memory beside two others
OTHER_PAIRS_STREAM = 700
UNLIKE_ITSELF = (
    "the job itself comes out otherwise when it is run again from the same weights on the same batches: its "
    "steps change something that it keeps outside of its model's weights and buffers"
)
COURSE_NAME = f"{Quantity.COURSE}, from step 0"
STREAMS, OTHER_STREAMS = 20, 50  # first seeds of the means over streams, of the reference and of a plan


class Ruler(Runner):
    """Serves `vivace.processes.launch.Child`: verifies plans of one job; keeps reference and shadows."""

    def prepare(
        self, seconds: float | None = None, reference: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Run the reference once, with snapshots at start, middle and late; `seconds` bound the effort.

        `reference` is a plan for a job that does not fit into memory without one.
        """
        with self.ranks.answering("the reference"):
            return self._prepare(seconds, reference)

    def _prepare(self, seconds: float | None, reference: dict[str, Any] | None) -> dict[str, Any]:
        self.reference = plan = Plan.from_dict(reference or {})
        self.snapshots: list[Snapshot] = []
        self.halves = {Plan().id: dict[Place, list[bool]]()}  # by the part of a plan that lowers precision
        self.standings: dict[tuple[bool, bool], Standing] = {}  # by `repeats` and `ordered`
        begin = time.perf_counter()
        seed_everything(0)
        self.batches = self._load(seconds)
        self._require_same_batches()
        with start(self.job, plan, self.machine) as trial:
            self.session = trial
            before, python = every_random_state(), InPython.of(trial, self.job)
            with (products := Products()):
                checked_step(trial, clone(self.batches[0]))
            self.own_roundoff = products.roundoff
            self.ordered = self.draws_numbers = not torch.equal(before, every_random_state())
            since = time.perf_counter()
            self._step(trial, 0)
            (self.step_seconds,) = self.ranks.largest(time.perf_counter() - since)
            self.effort = effort = Effort.within(seconds, self.step_seconds)
            python.put_back(trial)
        self.session = self._opened(plan, self.tap)
        self.facts = facts_of_session(self.session)
        self.evaluation = Evaluation(self.job, self.session.place(self._last_batch()))
        self.lives = self._course_of_lives()
        self._agree_on_shapes()
        last = max(0, effort.course - effort.lockstep)
        marks = {round(i * last / max(1, effort.snapshots - 1)) for i in range(effort.snapshots)}
        seed_everything(1)
        curve = []
        for position in range(effort.course):
            if position in marks:
                self.snapshots.append(Snapshot.of(self.session, self.job, position))
            curve.append(self._step(self.session, position))
        end = state_of(self.session)
        self.snapshots = moving_only(self.snapshots, self.session)
        self.evaluation.python = self.snapshots[0].python
        self._spread_snapshots()
        self.standing = Standing(self._locksteps(self.session), curve, end)
        self.standings[self.repeats, self.ordered] = self.standing
        self.modules = self.tap.modules
        self._live_again()
        self._hold_out()
        self._prepare_rehearsal(seconds)
        return {"seconds": time.perf_counter() - begin, **self._foretold()}

    def _prepare_rehearsal(self, seconds: float | None) -> None:
        """Rehearse the reference; two steps show how many can be afforded."""
        reference, first = self.standing.references[0], self.snapshots[0].state
        if has_sparse_gradients(self.session.build.models):
            return  # an optimizer for sparse gradients takes no dense ones
        self.slopes = slopes_like(reference.gradients, first.parameters)
        if not self.slopes and self.job.step is None:
            return  # nothing is trained
        self.ranks.spread(self.slopes.values())
        begin = time.perf_counter()
        self._rehearse(self.session, self.tap, 2)
        (each,) = self.ranks.largest((time.perf_counter() - begin) / 2)
        self.rehearsed_seconds = each
        self.effort = self.effort.rehearsing(seconds, each)
        self.standing.rehearsal = self._rehearse(self.session, self.tap, self.effort.rehearsal)

    def judge(self, plan: dict[str, Any], seconds: float | None = None) -> dict[str, Any]:
        """Return the verdict's document (see `Verdict`) on a plan; of several ranks, rank 0's.

        What is broken near the limits after a short effort is judged again with the full one, where
        `seconds` allow it, and else not yet.
        """
        with self.ranks.answering("the comparison"):
            return self._judged(plan, seconds)

    def _judged(self, plan: dict[str, Any], seconds: float | None) -> dict[str, Any]:
        document: dict[str, Any] = self.ranks.from_first(self._judgement(plan))
        full = Effort()
        least = dataclasses.replace(full, rehearsal=self.effort.rehearsal)
        if document["kept"] is not False or self.effort == least or not is_near(document):
            return document
        needed = full.seconds(self.step_seconds, self.rehearsed_seconds)
        if seconds is not None and needed > seconds:
            reason = f"{document['reason']}; too near to say with so few runs, and more take {needed:.0f} s"
            return {**document, "kept": None, "reason": reason}
        self.session.close()
        self._prepare(None, self.reference.to_dict())
        again: dict[str, Any] = self.ranks.from_first(self._judgement(plan))
        return again

    def _judgement(self, plan: dict[str, Any]) -> dict[str, Any]:
        """Run a plan in lockstep and along the course, and compare; a rank other than 0 only runs it."""
        loaded = Plan.from_dict(plan)
        device = self.session.build.device
        if device.type == "cuda" and loaded.promise == Numerics.EXACT and not self.repeats:
            with repeatable(True), self._standing_on(repeats=True, ordered=self.ordered):
                return self._judgement(plan)
        if loaded.compiles and self.ordered:  # compiled code draws as it will; so must the reference
            with self._standing_on(repeats=self.repeats, ordered=False):
                return self._judgement(plan)
        precision = self._note_halves(loaded)
        tap = Tap(self.job)
        alike = compiler.equal_random_numbers() if loaded.compiles else nullcontext()
        with alike, self._opened(loaded, tap) as session:
            ran = self._run(session, tap)
        closed = state_of(session)
        doubted = ran.fault and ran.rehearsal is not None and not ran.curve
        unlike = doubted and self._rehearses_otherwise()  # once what the plan changed in torch is put back
        if self.ranks.rank:
            return {}
        ran.precision = precision
        document: dict[str, Any] = {
            "promise": session.promise.name.lower(),
            "steps": self.effort.course + self.effort.lockstep * len(self.snapshots),
            "seeds": self.effort.seeds,
            "fed": ran.fed,
            "details": ran.details,
            "curves": {
                "steps": list(range(len(ran.curve))),
                "reference": self.standing.curve,
                "plan": ran.curve,
            },
        }
        if not ran.fault and different_states(closed, ran.last):
            ran.fault = "closing the session changes the weights"
        if unlike:
            return {**document, **unknown(UNLIKE_ITSELF)}
        if ran.fault:
            return {**document, **outright(False, ran.fault, Quantity.FACTS)}
        for outcome in ran.outcomes:
            outcome.outputs = (
                outcome.outputs if len(outcome.outputs) else self.evaluation(self.session, outcome.after)
            )
        found = self._if_moved(self._judge(ran, session))
        if session.promise == Numerics.ROUNDING:
            document["bias"] = {"pairs": ran.num_pairs, "not_tested": self._why_no_bias(ran)}
        reason = "; ".join(filter(None, (found["reason"], *ran.notes)))
        return {**document, **found, "reason": reason}

    def _note_halves(self, plan: Plan) -> Plan:
        """The part of a plan that lowers precision; what it stores in 16 bits is seen in a step of its own.

        Alone, as it is: the other techniques cannot widen the envelope by what they do.
        """
        precision = plan.precision
        if precision.id not in self.halves:
            noted = Halves()
            with start(self.job, precision, self.machine) as session:
                for position in range(SETTLING_STEPS if session.build.kept else 0):
                    self._step(session, position)
                with noted:
                    self._step(session, 0)
            self.halves[precision.id] = noted.places()
        return precision

    def _run(self, session: Session, tap: Tap) -> Ran:
        """All that a plan's session has to do while it is open; it ends at the first plain fault."""
        ran, standing = Ran(), self.standing
        ran.fault = self._agreed(self._fault_before_steps(session, ran))
        if ran.fault:
            return ran
        for position in range(SETTLING_STEPS if session.build.kept else 0):
            self._step(session, position)  # a loss scale halves until it fits, and skips steps meanwhile
        ran.outcomes = [self._lockstep(session, self.snapshots[0], stream=0)]
        if fault := self._agreed(difference(tap.modules or {}, self.modules or {}, only_shared=True)):
            return ran.ended(fault)
        # Before the other points: what begins late has begun by then.
        if standing.rehearsal is not None:
            ran.rehearsal = self._rehearse(session, tap, self.effort.rehearsal)
            if fault := self._agreed(fault_of(ran.rehearsal, standing.rehearsal)):
                return ran.ended(fault)
        if fault := self._agreed(self._overflow_fault(session, tap)):
            return ran.ended(fault)
        rest = list(enumerate(self.snapshots))[1:]
        ran.outcomes += [self._lockstep(session, s, stream=i) for i, s in rest]
        ran.curve, ran.end = self._course(session)
        self._compare_streams(session, ran)
        apart = self._draws_apart(session, ran)
        if apart:
            fault, uncounted = self._fault_of_draws(self._counted_draws(session))
            if fault:
                return ran.ended(fault)
            ran.notes += [uncounted] if uncounted else []
        if not (ran.same_streams or ran.silent or session.promise == Numerics.EXACT):
            ran.outcomes = [self._mean_lockstep(session, s, OTHER_STREAMS) for s in self.snapshots]
            ran.curve, ran.end = self._mean_course(session, OTHER_STREAMS)
        ran.evaluated = self.evaluation.everywhere(session, ran.end)
        ran.measured = self._measured(session, ran.end)
        if session.promise == Numerics.ROUNDING:
            stream = PAIRS_STREAM if ran.same_streams else OTHER_PAIRS_STREAM
            pairs = self._pairs(session, self._num_pairs(ran), stream=stream)
            ran.biases, ran.num_pairs = estimates(pairs), len(pairs)
            with suppress(Unlike):
                ran.handed = estimates(self._handed_pairs(session, self._num_pairs(ran) if apart else 0))
        if session.promise < Numerics.SEMANTICS:
            self._run_life(session, ran)
        ran.last = state_of(session)
        return ran

    def _fault_before_steps(self, session: Session, ran: Ran) -> str:
        """Is the session another one than the reference's, or fed otherwise? What could not be compared is
        noted.
        """
        if fault := difference(facts_of_session(session), self.facts):
            return fault
        first = self.snapshots[0].state
        exact = session.promise == Numerics.EXACT
        roundoff = 0.0 if exact else max(session.build.unit_roundoff, FINEST_ROUNDOFF)
        if changed := opened_otherwise(state_of(session), first, roundoff):
            with start(self.job, self.reference, self.machine) as again:
                if not opened_otherwise(state_of(again), first, roundoff):
                    return f"opening the session changes {changed[0]}"
        rank, num = self.ranks.rank, session.build.facts.ranks or 1
        reach = Reach(self.feeding_seconds, self.stream_seconds)
        feeds: dict[str, Callable[[], Fed]] = {
            "share": partial(shared_otherwise, self.job, rank, num),
            "data": partial(fed_otherwise, session, self.job, reach, rank, num),
            "validation": partial(validated_otherwise, session, self.job, reach),
        }
        for what, compare in feeds.items():
            fault, note, read, ends = compare()
            if fault:
                return fault
            if self.ranks.world_size == 1:
                self.lives = self.lives.ending(ends)
            ran.notes += [note] if note else []
            ran.fed |= {what: [one.to_dict() for one in read]} if read else {}
        return ""

    def _compare_streams(self, session: Session, ran: Ran) -> None:
        """Does the session draw the reference's random numbers, on every rank?"""
        pairs = list(zip(ran.outcomes, self.standing.references, strict=True))
        rearranged = not self.ordered and strides_of(session) != strides_of(self.session)
        same = all(same_streams(o, r, rearranged) for o, r in pairs)
        same = same and not (any(r.drew for _, r in pairs) and self._masks_otherwise(session))
        silent = any(r.drew and not o.drew for o, r in pairs)
        seen = self.ranks.gather((same, silent))
        ran.same_streams, ran.silent = all(one for one, _ in seen), any(one for _, one in seen)

    def _masks_otherwise(self, session: Session) -> bool:
        """May it leave out other elements from the same stream?

        Kernels of attention for GPUs draw their masks themselves, each in its own way, and one kernel in
        another way for 16 bits; so does a GPU's dropout in compiled code, which `LogicalDraws` does not see.
        """
        build = session.build
        if session.plan.is_opaque or (build.facts.ranks or 1) > 1:
            return build.device.type == "cuda" and bool(session.plan.precision.techniques)
        return self._counted_draws(session)[0].hidden != self._counted_draws(self.session)[0].hidden

    def _draws_apart(self, session: Session, ran: Ran) -> bool:
        """Does it draw other random numbers, and can be seen doing so?

        Not of several ranks, of which each draws for its share, nor of compiled code.
        """
        alone = (session.build.facts.ranks or 1) == 1
        apart = alone and not (ran.same_streams or ran.silent or session.plan.is_opaque)
        return apart and session.promise == Numerics.ROUNDING

    def _num_pairs(self, ran: Ran) -> int:
        """Pairs of gradients that differ, be it by their masks; none of a job with its own step."""
        drew = any(self.ranks.gather(any(outcome.drew for outcome in ran.outcomes)))
        num = self.effort.pairs if drew else min(self.effort.pairs, len(self.batches))
        return num if self.job.loss is not None else 0

    def _why_no_bias(self, ran: Ran) -> str:
        """Why there is no figure of bias; empty where there are some."""
        if ran.biases:
            return ""
        if self.job.loss is None:
            return "the job has a step of its own"
        if not self.effort.pairs:
            return "so short an effort leaves no time for it"
        return f"it needs {FEWEST} gradients of different batches, and there were {ran.num_pairs}"

    def _run_life(self, session: Session, ran: Ran) -> None:
        size = bytes_of(p for model in session.build.models for p in model.parameters())
        resumes = size < MOST_RESUMED_BYTES and not session.plan.is_opaque
        resumed = partial(self._resumed, session.plan) if resumes else None
        ran.life = self._unskipped_life(session, resumed)
        ran.fault = ran.life.fault
        left_out = unseen(self.lives)
        ran.notes, ran.details = [*ran.notes, *left_out.told], [*ran.details, *left_out.details]
        if not (ran.same_streams or ran.silent or ran.fault):
            ran.life = self._mean_life(session, OTHER_STREAMS, ran.life)

    def _live_again(self) -> None:
        """Let the reference go through its life, where it has not or other ends of epochs are known now."""
        if self.standing.lived is not self.lives:
            self.standing.life, self.standing.lived = self._live(self.session), self.lives
            self.standing.grounds.clear()

    def _judge(self, ran: Ran, session: Session) -> dict[str, Any]:
        self._live_again()
        promise, roundoff = session.promise, max(session.build.unit_roundoff, FINEST_ROUNDOFF)
        if promise == Numerics.EXACT:
            standing = self.standing
            pairs = zip(ran.outcomes, standing.references, strict=True)
            different = [name for o, r in pairs for name in identical(o, r)]
            different += ["loss curve"] if ran.curve != standing.curve else []
            different += ["rehearsal"] if not same_rehearsals(ran.rehearsal, standing.rehearsal) else []
            if ran.life is not None and standing.life is not None:
                lived = identical(ran.life.outcome, standing.life.outcome)
                different += [f"{name}, {WHEN}," for name in lived]
            evaluated = self._evaluation_checks(ran, FINEST_ROUNDOFF)
            unlike = [c for c in evaluated if c["kept"] is False or c["value"] > FINEST_ROUNDOFF]
            different += [f"{c['name']}," for c in unlike]
            if not different or self._repeats_itself():
                reason = f"promised to be bit-identical, and {different[0]} is not" if different else ""
                return outright(not different, reason, Quantity.BITS)
            note = "the job does not repeat itself bit for bit here, so that only rounding can be judged"
            return self._compare(ran, roundoff, note)
        if ran.silent:
            reason = "the plan draws no random numbers where the job draws some: dropout or noise is off"
            return outright(False, reason, Quantity.DRAWS)
        return self._compare(ran, roundoff)

    @contextmanager
    def _standing_on(self, *, repeats: bool, ordered: bool) -> Iterator[None]:
        """Inside, the reference is what it is under other circumstances: with algorithms that repeat their
        bits, as a GPU's fastest do not, or without random numbers in logical order.
        """
        before = self.repeats, self.ordered, self.standing
        changed = repeats != self.repeats or self.draws.rearranged
        self.repeats, self.ordered = repeats, ordered
        try:
            if changed and (repeats, ordered) not in self.standings:
                references, (curve, end) = self._locksteps(self.session), self._course(self.session)
                rehearsal = self.standing.rehearsal
                if rehearsal is not None:
                    rehearsal = self._rehearse(self.session, self.tap, self.effort.rehearsal)
                self.standings[repeats, ordered] = Standing(references, curve, end, rehearsal)
            self.standing = self.standings.get((repeats, ordered), self.standing)
            self._live_again()
            yield
        finally:
            self.repeats, self.ordered, self.standing = before

    def _rehearses_otherwise(self) -> bool:
        """Do the reference's optimizers have other settings when its rehearsal is run again?"""
        again, before = self._rehearse(self.session, self.tap, self.effort.rehearsal), self.standing.rehearsal
        return before is not None and bool(fault_of(again, before))

    def _repeats_itself(self) -> bool:
        """Does the reference end with equal bits when it is run again?"""
        pairs = zip(self._locksteps(self.session), self.standing.references, strict=True)
        again = not any(identical(o, r) for o, r in pairs)
        return again and self._course(self.session)[0] == self.standing.curve

    def _compare(
        self, ran: Ran, roundoff: float, note: str = "", further: Sequence[dict[str, Any]] = ()
    ) -> dict[str, Any]:
        outcomes, curve, same_streams = ran.outcomes, ran.curve, ran.same_streams
        ground = self._ground(roundoff, same_streams, ran.precision)
        checks = list(further)
        for index, (outcome, snapshot) in enumerate(zip(outcomes, self.snapshots, strict=True)):
            values = self._distances(outcome, snapshot, ground.references[index])
            envelopes = ground.envelopes[index]
            checks += [check(k, snapshot.position, v, envelopes[k], roundoff) for k, v in values.items()]
            if not same_streams:
                spread = ground.references[index].spread
                checks.append(spread_check(snapshot.position, outcome.spread, spread))
        checks.append(curve_check(curve, ground.curve, ground.widths))
        apart = self._apart(ran.end, ground.end)
        course, wide = Measure(Quantity.COURSE), {"floor": 0.25 * roundoff, "limit": LAYER_LIMIT}
        checks.append(check(course, 0, apart, ground.end_envelope, roundoff, **wide))
        checks += self._evaluation_checks(ran, roundoff)
        middle = self.snapshots[len(self.snapshots) // 2].position
        checks += bias_checks(ran.biases, ground.biases, middle)
        checks += bias_checks(ran.handed, ground.biases, middle, ", with its own masks")
        if ran.life is not None:
            values = self._life_distances(ran.life.outcome, ground.life)
            checks += life_checks(values, ground.life_envelopes, roundoff)
        if ran.rehearsal is not None and self.standing.rehearsal is not None:
            before = self.snapshots[0].state.parameters
            checks += checks_of(ran.rehearsal, self.standing.rehearsal, before, self.slopes, roundoff)
        if same_streams:
            checks = self._beside_kinks(checks, ground, roundoff, ran.precision)
        if not same_streams:
            text = f"random streams differ: means over {self.effort.seeds} seeds were compared"
            note = "; ".join(filter(None, (note, text)))
        low = [a - LIMIT * w for a, w in zip(ground.curve, ground.widths, strict=True)]
        high = [a + LIMIT * w for a, w in zip(ground.curve, ground.widths, strict=True)]
        steps = list(range(len(curve)))
        curves = {"steps": steps, "reference": ground.curve, "plan": curve, "low": low, "high": high}
        found = summary(checks, note)
        if found["kept"] is False and self._is_unlike_itself(self.standing.references[0]):
            found = unknown(UNLIKE_ITSELF)
        return {**found, "curves": curves}

    def _evaluation_checks(self, ran: Ran, roundoff: float) -> list[dict[str, Any]]:
        seen, roundoff = [(ran.end, ran.evaluated, "")], max(roundoff, self.own_roundoff)
        seen += [(state, outputs, WHEN) for state, outputs in (ran.life.evaluated if ran.life else [])]
        found = self._own_metric_checks(ran, roundoff)
        for state, outputs, when in seen:
            plain = self.evaluation.everywhere(self.session, state)
            found += evaluation_checks(outputs, plain, roundoff, when, self.evaluation.unread)
        return found

    def _life_distances(self, outcome: Outcome, reference: Outcome) -> dict[Measure, float]:
        begin, steps = self.snapshots[0], self.lives.num_steps
        return distances(outcome, reference, begin.state, begin.decay, steps)

    def _ground(self, roundoff: float, same_streams: bool, precision: Plan) -> Ground:
        """The envelope: shadows of this roundoff that store in half what `precision` does, with the
        reference's random streams or with others.

        Where streams differ, means over seeds are compared: one shadow's distance from a mean over n seeds is
        sqrt((n + 1) / 2) times that of another mean over n seeds.
        """
        halves = self.halves[precision.id]
        key, standing = (roundoff, same_streams, precision.id if halves else ""), self.standing
        if key in standing.grounds:
            return standing.grounds[key]
        effort, session = self.effort, self.session
        if same_streams:
            references, curve, end = standing.references, standing.curve, standing.end
        else:
            references = [self._mean_lockstep(session, s, STREAMS) for s in self.snapshots]
            curve, end = self._mean_course(session, STREAMS)
        envelopes = []
        for index, snapshot in enumerate(self.snapshots):
            runs = []
            for seed in range(effort.seeds):
                noise = Rounding(roundoff, seed=100 * index + seed, halves=halves)
                stream = index if same_streams else 80 + seed
                outcome = self._lockstep(session, snapshot, stream=stream, noise=noise)
                runs.append(self._distances(outcome, snapshot, references[index]))
            scale = 1.0 if same_streams else math.sqrt(2 / (effort.seeds + 1))
            smallest = resolution(references[index], snapshot.state, runs)
            envelopes.append(envelope_of(runs, scale, smallest))
        courses, ends = [], []
        for seed in range(effort.course_seeds):
            noise = Rounding(roundoff, seed=9000 + seed, halves=halves)
            shadow, shadow_end = self._course(session, stream=1 if same_streams else 80 + seed, noise=noise)
            courses.append(shadow)
            ends.append(self._apart(shadow_end, end))
        scale = 1.0 if same_streams else math.sqrt(2 / (effort.course_seeds + 1))
        widths = band(curve, courses, scale)
        end_envelope = scale * root_mean_square(ends)
        end_envelope = end_envelope if math.isfinite(end_envelope) else math.nan
        life, life_envelopes = self._life_ground(roundoff, same_streams, halves)
        biases = self._bias_ground(roundoff, halves)
        ground = Ground(references, envelopes, curve, end, widths, end_envelope, life, life_envelopes, biases)
        standing.grounds[key] = ground
        return ground

    def _beside_kinks(
        self, checks: list[dict[str, Any]], ground: Ground, roundoff: float, precision: Plan
    ) -> list[dict[str, Any]]:
        """The figures; those that broke are held against shadows that round more coarsely, yet less so than
        the limits allow.

        Where the input of a ReLU lies next to zero, or a weight's gradient in Adam's first step, rounding
        throws what follows to the other side by a whole step, however small it is: the coarser, the oftener.
        """
        broken = {figure["name"]: figure for figure in checks if figure["kept"] is False}
        reach: dict[str, float] = {}
        if any(figure["score"] > FAR * figure["limit"] for figure in broken.values()):
            return checks
        for seed in range(COARSER_SEEDS if broken else 0):
            noise = partial(Rounding, COARSER * roundoff, 39_000 + seed, self.halves[precision.id])
            found = self._reached(broken.keys(), ground, noise)
            if not broken.keys() <= found.keys():
                return checks  # one of what has no kink
            reach = {name: max(found[name], reach.get(name, 0.0)) for name in broken}
            if all(abs(figure["value"]) <= reach[name] for name, figure in broken.items()):
                break
        return [widened(c, reach[c["name"]]) if c["name"] in reach else c for c in checks]

    def _reached(
        self, names: Iterable[str], ground: Ground, noise: Callable[[], Rounding]
    ) -> dict[str, float]:
        """The distances of one shadow, by the figures' names, of the runs that hold one of `names`."""
        found: dict[str, float] = {}
        for index, snapshot in enumerate(self.snapshots):
            begin = f", from step {snapshot.position}"
            if any(name.endswith(begin) for name in names if name != COURSE_NAME):
                outcome = self._lockstep(self.session, snapshot, stream=index, noise=noise())
                values = self._distances(outcome, snapshot, ground.references[index])
                found |= {f"{measure}{begin}": value for measure, value in values.items()}
        if COURSE_NAME in names:
            found[COURSE_NAME] = self._apart(self._course(self.session, noise=noise())[1], ground.end)
        if any(name.endswith(WHEN) for name in names):
            shadow = self._live(self.session, stream=3, noise=noise())
            values = self._life_distances(shadow.outcome, ground.life)
            found |= {f"{measure}, {WHEN}": value for measure, value in values.items()}
        return found

    def _life_ground(
        self, roundoff: float, same_streams: bool, halves: dict[Place, list[bool]]
    ) -> tuple[Outcome, dict[Measure, float]]:
        """The reference's life, and the envelope of each of its figures."""
        assert self.standing.life is not None
        life, count = self.standing.life, self.effort.life_seeds
        life = life if same_streams else self._mean_life(self.session, STREAMS, life)
        if not count:
            return life.outcome, {}
        runs = []
        for seed in range(count):
            noise = Rounding(roundoff, seed=19_000 + seed, halves=halves)
            shadow = self._live(self.session, stream=3 if same_streams else 80 + seed, noise=noise)
            runs.append(self._life_distances(shadow.outcome, life.outcome))
        scale = 1.0 if same_streams else math.sqrt(2 / (count + 1))
        smallest = resolution(life.outcome, self.snapshots[0].state, runs)
        return life.outcome, envelope_of(runs, scale, smallest)

    def _bias_ground(self, roundoff: float, halves: dict[Place, list[bool]]) -> dict[Measure, float]:
        """What right rounding brings of each bias."""
        effort = self.effort
        count = min(SHADOW_PAIRS, effort.pairs, len(self.batches)) if self.job.loss is not None else 0
        shadows = [
            self._pairs(self.session, count, noise=partial(Rounding, roundoff, 29_000 + seed, halves))
            for seed in range(effort.life_seeds)
        ]
        return spread_of(shadows)
