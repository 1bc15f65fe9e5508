"""What reference, shadows and plans run, each from a snapshot: steps, lockstep, course, rehearsal, life."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from vivace.data.order import share_of
from vivace.errors import JobError, Refused
from vivace.job import Batch, Job
from vivace.machine import Machine
from vivace.plan import Plan
from vivace.session.opening import call, first_batches, readable, seed_everything, start
from vivace.session.session import Session
from vivace.technique import Numerics
from vivace.tensors.modules import named_parameters
from vivace.tensors.randomness import derive, host_state, same_host_state
from vivace.tensors.trees import batch_size, bytes_of, digest, split, tensors
from vivace.torch_internals.tensors import storage_ids
from vivace.training.ranks import Ranks, met_under
from vivace.verifying.bias import Gradient, Pair, pairs_of
from vivace.verifying.displacement import Outcome, State, Tensors, distances, mean_outcome, moved_square
from vivace.verifying.draws import LogicalDraws
from vivace.verifying.effort import MOST_REHEARSED, Effort, feeding_seconds
from vivace.verifying.evaluation import Evaluation
from vivace.verifying.feeding import EPOCHS, EVALUATIONS, Loaders
from vivace.verifying.figures import Measure, Quantity
from vivace.verifying.ground import Ran, Standing
from vivace.verifying.judgement import LIMIT, unknown
from vivace.verifying.life import Course, Life, course_of, held_out, live, shape_of, validate
from vivace.verifying.masks import Counted, Handed, Kept, Unlike, fault_of, shared_by_samples
from vivace.verifying.measured import FEWEST_BATCHES, SHADOWS, Measured, OwnMeasure, check_of
from vivace.verifying.rehearsal import DictatedLoss, Rehearsal, rehearse
from vivace.verifying.resumed import resume
from vivace.verifying.shadow import FINEST_ROUNDOFF, Rounding
from vivace.verifying.skipping import num_skipped, overflow_fault
from vivace.verifying.states import InPython, Snapshot, clone, moving_only, restore, state_of
from vivace.verifying.tap import Tap, every_random_state

FEEDING_SECONDS, FEEDING_SHARE = 10.0, 0.02  # at most, of the seconds given
STREAM_SECONDS, STREAM_SHARE = (
    60.0,
    0.1,
)  # the same for all passes over a stream, whose end has to be waited for
MOST_BATCH_BYTES = 2**28
MOST_LONG = 512  # steps
SETTLING_STEPS = 8  # a loss scale halves until it fits, and skips steps meanwhile
UNMOVED = (
    "the job's own steps left every weight where it was, so no update could be compared: its learning rate "
    "may be 0, or its step updates more rarely"
)
SAME_WEIGHTS = (
    "the Job's model() gives the same weights each time it is called, so that a plan would be held against a "
    "model that is trained already: build a new one in it, or return copy.deepcopy of yours"
)
NO_NUMBER = (
    "the job's own loss is NaN at step {}, without any plan, and a NaN cannot be compared: mend the job first"
)
Found = TypeVar("Found")
PAIRS_STREAM, PROBE_STREAM = 500, 900  # first seeds of the reference's random streams
AGAIN_STREAM = 1300  # and of a plan's second ones
CHANCES = 8  # streams under which a step may draw more often, or less


class Runner:
    """Runs sessions of one job, of the reference (`session`) and of plans, on the same batches.

    Of several ranks, which meet under the name `meeting`, each runs the reference with whole batches; a
    session whose plan averages over ranks gets its share. On a processor with so many `threads`, if they are
    given.
    """

    session: Session
    evaluation: Evaluation
    snapshots: list[Snapshot]
    standing: Standing

    def __init__(self, job: Job, machine: dict[str, Any], meeting: str = "", threads: int = 0) -> None:
        self.job = job
        self.ranks = met_under(meeting) if meeting else Ranks()
        self.machine = Machine.from_dict(machine)
        if threads and self.machine.device.kind == "cpu":
            torch.set_num_threads(threads)
        self.effort = Effort()
        self.batches: list[Any] = []
        self.repeats = False  # are the algorithms now such that give equal bits every time?
        self.draws = LogicalDraws()
        self.ordered = False  # do steps draw their random numbers in logical order now?
        self.tap = Tap(job)
        self.taps = WeakKeyDictionary[Session, Tap]()
        self.feeding_seconds, self.stream_seconds = FEEDING_SECONDS, STREAM_SECONDS
        self.lives = Course([], [])
        self.evaluates: Callable[[Session], object] | None = None  # after an epoch of any life, where said
        self.slopes: Tensors = {}
        self.draws_numbers = False  # does a step of the job?
        self.own_roundoff = 0.0  # of matrix products that the job itself has in 16 bits
        self.step_seconds = self.rehearsed_seconds = 0.0  # of one step

    def _load(self, seconds: float | None) -> list[Any]:
        """Batches enough for the course, and for the rehearsal as many more as time and memory allow."""
        if seconds is not None:
            self.feeding_seconds = min(FEEDING_SECONDS, FEEDING_SHARE * seconds)
            self.stream_seconds = min(STREAM_SECONDS, STREAM_SHARE * seconds)
        deadline, num_bytes = time.perf_counter() + self.feeding_seconds, 0
        loader = readable(call(self.job, "data"), self.job)

        def limited() -> Iterator[Any]:
            nonlocal num_bytes
            for number, batch in enumerate(loader, 1):
                yield batch
                num_bytes += bytes_of(tensors(batch))
                enough = num_bytes > MOST_BATCH_BYTES or time.perf_counter() > deadline
                if number >= Effort.course and enough:
                    return

        batches = first_batches(limited(), MOST_REHEARSED)
        return batches[: min(self.ranks.gather(len(batches)))]

    def _last_batch(self) -> Any:
        """The last one that holds samples."""
        return next((b for b in reversed(self.batches) if batch_size(b)), self.batches[-1])

    def _require_same_batches(self) -> None:
        """Raises JobError where ranks read other batches than rank 0."""
        ends = [digest(self.batches[0]), digest(self.batches[-1])]
        if any(other != ends for other in self.ranks.gather(ends)):
            raise JobError(
                "the ranks read different batches, and Vivace splits every batch itself: give the data's "
                "shuffle a seed, and leave out what splits them by rank"
            )

    def _agree_on_shapes(self) -> None:
        """Live through batches of those shapes alone that every rank has found in its time."""
        found = self.ranks.gather({str(shape_of(batch)) for batch in self.lives.shaped})
        everywhere = set.intersection(*found)
        self.lives.shaped = [batch for batch in self.lives.shaped if str(shape_of(batch)) in everywhere]

    def _spread_snapshots(self) -> None:
        """All ranks begin where rank 0's reference was: a GPU's sums may differ from one's to another's."""
        for snapshot in self.snapshots:
            for named in (snapshot.state.parameters, snapshot.state.buffers):
                self.ranks.spread(named.values())
            self.ranks.spread(tensors(snapshot.optimizers))

    def _share(self, session: Session, batch: Batch) -> Any:
        """What a session gets of a batch: all of it, or this rank's part. Raises JobError on uneven parts."""
        num = session.build.facts.ranks or 1
        return share_of(batch, self.ranks.rank, num)

    def _seed(self, session: Session, stream: int) -> None:
        """Begin a random stream; that of another rank is as independent of rank 0's as in training."""
        own = self.draws_numbers and (session.build.facts.ranks or 1) > 1 and self.ranks.rank
        seed_everything(derive(stream, "rank", self.ranks.rank) if own else stream)

    def _agreed(self, fault: str) -> str:
        """What the first rank that found a fault found."""
        return next(filter(None, self.ranks.gather(fault)), "")

    def _course_of_lives(self) -> Course:
        """What lives bring, as far as time allows; the same on all ranks. Raises JobError where a pass over
        the data holds nothing.
        """

        def agreed(reached: bool) -> bool:
            return all(self.ranks.gather(reached))

        course = course_of(Loaders(self.job), self.batches, self.feeding_seconds, agreed)
        if any(read.whole and not read.batches for read in course.read):
            raise JobError(
                "the Job's data() gave no batch when it was read again: let it make its batches anew"
            )
        return course

    def _foretold(self) -> dict[str, float]:
        """About how many seconds a plan takes: with its shadows, an exact one without, and more where a
        technique touches the batches.
        """
        steps = self.step_seconds, self.rehearsed_seconds
        # On a GPU the reference runs again for an exact plan, with algorithms that repeat their bits.
        runs = 1 + (self.session.build.device.type == "cuda" and not self.repeats)
        course, most = self.lives, (self.feeding_seconds, self.stream_seconds)
        passes = EPOCHS, EVALUATIONS if self.job.metric is not None else 0
        feeding = feeding_seconds(course.pass_seconds, *most, is_stream=course.is_stream, passes=passes)
        return {
            "left_seconds": self.effort.seconds(*steps),
            "exact_seconds": runs * self.effort.plan_seconds(*steps),
            "feeding_seconds": feeding,
        }

    def _note_python(self) -> None:
        """Let each snapshot hold what the job's own steps up to there make of its Python state."""
        restore(self.session, self.snapshots[0])
        seed_everything(1)
        waiting, position = [*self.snapshots], 0
        self.snapshots = []
        while waiting:
            if waiting[0].position == position:
                python = InPython.of(self.session, self.job)
                self.snapshots.append(dataclasses.replace(waiting.pop(0), python=python))
            self._step(self.session, position)
            position += 1
        self.snapshots = moving_only(self.snapshots, self.session)
        self.evaluation.python = self.snapshots[0].python

    def _hold_out(self) -> None:
        """Let evaluations look at validation data too; on all ranks at the same."""
        held = held_out(self.job, self.feeding_seconds)
        self.evaluation.hold_out(self.session, held[: min(self.ranks.gather(len(held)))])

    def _pairs(
        self,
        session: Session,
        count: int,
        *,
        stream: int = PAIRS_STREAM,
        noise: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> list[Pair]:
        """Pairs of single-step gradients, of a session and of the reference's own, from the middle snapshot.

        The reference draws from `PAIRS_STREAM` on, the session from `stream` on; `noise` is made anew for
        each step.
        """
        gradient = self._gradient

        def others(number: int) -> tuple[Gradient, Gradient]:
            again = gradient(session, AGAIN_STREAM, number, nullcontext())
            return again, gradient(self.session, PROBE_STREAM, number, nullcontext())

        return pairs_of(
            lambda number: gradient(session, stream, number, noise()),
            lambda number: gradient(self.session, PAIRS_STREAM, number, nullcontext()),
            None if stream == PAIRS_STREAM else others,
            count,
        )

    def _gradient(
        self, acting: Session, stream: int, number: int, around: AbstractContextManager[Any]
    ) -> Gradient:
        """Of one step on the batch of this number, from the middle snapshot; none where the step was skipped,
        as a loss scale that is too large makes it.
        """
        restore(acting, self.snapshots[len(self.snapshots) // 2])
        before = num_skipped(acting)
        self._seed(acting, stream + number)
        tap = self.taps[acting]
        tap.watch()
        try:
            with around:
                loss = self._step(acting, number)
        finally:
            tap.watching = False
        return Gradient(loss, tap.gradients if num_skipped(acting) == before else {})

    def _handed_pairs(self, session: Session, count: int) -> list[Pair]:
        """Pairs in which the reference's step gets the masks that the session's drew, be these of streams or
        pieces of its own. Raises Unlike where they do not fit.
        """
        kept, host = Kept(), dict[str, Any]()

        def mine(number: int) -> Gradient:
            nonlocal kept, host
            kept = Kept()

            def forward(following: Callable[[Any], Any], batch: Batch) -> Any:
                kept.begin_piece()
                return following(batch)

            with session.seams.observed(forward=forward):
                found = self._gradient(session, PAIRS_STREAM, number, kept)
            host = host_state()
            return found

        def theirs(number: int) -> Gradient:
            handed = Handed(kept.pieces)
            found = self._gradient(self.session, PAIRS_STREAM, number, handed)
            if handed.num_drawn != len(kept.pieces[0]):
                raise Unlike("the plan draws more random numbers than the job")
            if not same_host_state(host, host_state()):
                raise Unlike("the plan draws other random numbers from Python or NumPy")
            return found

        return pairs_of(mine, theirs, None, count)

    def _fault_of_draws(self, mine: tuple[Counted, Counted], whose: str = "the plan") -> tuple[str, str]:
        """Does a step draw too little, or twice the same? With what is told where that cannot be counted."""
        theirs = self._counted_draws(self.session)
        fault = fault_of(mine[0], theirs[0], whose) or shared_by_samples(mine, theirs, whose)
        hidden = mine[0].hidden or theirs[0].hidden
        others = range(AGAIN_STREAM, AGAIN_STREAM + (CHANCES if fault else 0))
        again = [self._counted_draws(self.session, stream)[0] for stream in others]
        if any(len(one.places) != len(theirs[0].places) for one in again):
            fault, hidden = "", "chance decides how many"
        return fault, f"the random numbers of a step were not counted: {hidden}" if hidden else ""

    def _counted_draws(self, session: Session, stream: int = PAIRS_STREAM) -> tuple[Counted, Counted]:
        """What steps on a batch and on half of it draw; twice that of the whole where there is no half."""

        def counted(batch: Batch) -> Counted:
            restore(session, self.snapshots[len(self.snapshots) // 2])
            self._seed(session, stream)
            with (kept := Kept()):
                self._step_on(session, clone(batch))
            found, drawn = kept.counted, kept.digests()
            with (kept := Kept()):
                self._step_on(session, clone(batch))
            return Counted(*found[:3], stays=not {*drawn}.isdisjoint(kept.digests()))

        whole = counted(self.batches[0])
        try:
            size = max(1, batch_size(self.batches[0]) // 2)
            return whole, counted(split(self.batches[0], size)[0])
        except Exception:  # a person's model may take no other number of samples
            return whole, whole

    def _live(
        self,
        session: Session,
        *,
        stream: int = 3,
        noise: AbstractContextManager[Any] | None = None,
        outputs: Callable[[Session], list[torch.Tensor]] = lambda _: [],
        loaders: Loaders | None = None,
        evaluate: Callable[[Session], object] = lambda _: None,
        resumed: Callable[[Session], Session] | None = None,
    ) -> Life:
        """A life from the start; see `live`."""
        return live(
            session,
            self.snapshots[0],
            self.lives,
            lambda acting, batch: self._step_on(acting, batch, noise),
            outputs,
            partial(self._seed, session, stream),
            loaders,
            evaluate if self.evaluates is None else self.evaluates,
            resumed,
        )

    def _unskipped_life(self, session: Session, resumed: Callable[[Session], Session] | None) -> Life:
        """A plan's life; again where a loss scale had to fall in it. In a resumed session it need not."""
        for _ in range(SETTLING_STEPS):
            life = self._live(
                session,
                outputs=self.evaluation.as_it_is,
                loaders=Loaders(self.job),
                evaluate=partial(validate, job=self.job) if self.job.metric is not None else lambda _: None,
                resumed=resumed,
            )
            if not (life.skipped or life.skipped_resumed):
                break
        if life.skipped_resumed and not life.skipped:
            life.fault = life.fault or "after each resume it skips steps, because its loss scale begins anew"
        return life

    def _mean_life(self, session: Session, stream: int, first: Life) -> Life:
        """The mean of lives under several random streams, with what the first one's evaluations were."""
        seeds = range(self.effort.life_seeds)
        outcomes = [self._live(session, stream=stream + seed).outcome for seed in seeds]
        return dataclasses.replace(first, outcome=mean_outcome(outcomes))

    def _resumed(self, plan: Plan, session: Session) -> Session:
        """A new session that goes on from a checkpoint, closed with `session`; that one where the plan acts
        once in a process. Raises CheckpointError.
        """
        tap = Tap(self.job)
        try:
            again = resume(session, lambda: self._opened(plan, tap), self.session)
        except Refused:
            return session
        session.build.on_close(again.close)
        return again

    def _measured(self, session: Session, state: State) -> list[Measured | None]:
        """The metric in this state, of a job with its own step: nothing else tells what it evaluates."""
        if self.job.loss is not None or self.ranks.world_size > 1:
            return []
        return [OwnMeasure(self.job, session, FEWEST_BATCHES, math.inf)(state)]

    def _own_metric_checks(self, ran: Ran, roundoff: float) -> list[dict[str, Any]]:
        """The figure of `_measured` under a plan; a note in its place where the job has none to compare."""
        if not ran.measured or self.job.metric is None:
            return []
        measure = OwnMeasure(self.job, self.session, FEWEST_BATCHES, math.inf)
        first = measure(ran.end)
        if first is not None and ran.measured[0] == first:
            return [check_of(first, first, [])]
        if first is None or first != measure(ran.end):
            why = (
                "fails without any plan" if first is None else "says otherwise each time of the same weights"
            )
            ran.notes = list(dict.fromkeys([*ran.notes, f"the metric was not compared: it {why}"]))
            return []
        noises = (Rounding(roundoff, seed=49_000 + seed, halves={}) for seed in range(SHADOWS))
        shadows = [found for noise in noises if (found := measure(ran.end, around=noise)) is not None]
        return [check_of(ran.measured[0] or Measured(math.nan, *first[1:]), first, shadows)]

    def _rehearse(self, session: Session, tap: Tap, steps: int) -> Rehearsal:
        return rehearse(
            session,
            tap,
            self.job,
            self.snapshots[0],
            self.batches,
            DictatedLoss(self.slopes, session.build.device),
            steps=steps,
            roundoff=session.build.unit_roundoff,
            share=partial(self._share, session),
        )

    def _overflow_fault(self, session: Session, tap: Tap) -> str:
        if session.promise == Numerics.SEMANTICS:
            return ""
        dictate = DictatedLoss(self.slopes, session.build.device)
        batch = self._share(session, self.batches[0])
        return overflow_fault(session, tap, self.snapshots[0], batch, dictate)

    def _opened(self, plan: Plan, tap: Tap) -> Session:
        session = start(tap.job, plan, self.machine)
        if hasattr(self, "session") and _trained(session) & _trained(self.session):
            session.close()
            raise JobError(SAME_WEIGHTS)
        tap.attach(session)
        self.taps[session] = tap
        return session

    def _step(self, session: Session, position: int) -> float:
        return self._step_on(session, clone(self.batches[position % len(self.batches)]))

    def _step_on(
        self, session: Session, batch: Batch, noise: AbstractContextManager[Any] | None = None
    ) -> float:
        with noise or nullcontext(), self.draws if self.ordered else nullcontext():
            loss = session.step(self._share(session, batch))
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
        return self._unskipped(session, partial(self._steps_from, session, snapshot, stream, noise))

    def _steps_from(
        self,
        session: Session,
        snapshot: Snapshot,
        stream: int,
        noise: AbstractContextManager[Any] | None,
    ) -> Outcome:
        restore(session, snapshot)
        self._seed(session, stream)
        before, tap = every_random_state(), self.taps[session]
        tap.watch()
        with noise or nullcontext():
            losses = [self._step(session, snapshot.position)]
            tap.watching = False
            losses += [self._step(session, snapshot.position + i) for i in range(1, self.effort.lockstep)]
        drawn, after = every_random_state(), state_of(session)
        outputs = self.evaluation(session, after) if session is self.session else torch.empty(0)
        drew = not torch.equal(before, drawn)
        return Outcome(losses, after, outputs, drawn, drew, tap.gradients, list(tap.streams))

    def _unskipped(self, session: Session, run: Callable[[], Found]) -> Found:
        """What `run` brings; again where a loss scale had to fall in it, because a skipped step is none."""
        for _ in range(SETTLING_STEPS):
            before = num_skipped(session)
            found = run()
            if num_skipped(session) == before:
                break
        return found

    def _mean_lockstep(self, session: Session, snapshot: Snapshot, stream: int) -> Outcome:
        return mean_outcome(
            [self._lockstep(session, snapshot, stream=stream + seed) for seed in range(self.effort.seeds)]
        )

    def _course(
        self, session: Session, *, stream: int = 1, noise: AbstractContextManager[Any] | None = None
    ) -> tuple[list[float], State]:
        def run() -> tuple[list[float], State]:
            restore(session, self.snapshots[0])
            self._seed(session, stream)
            with noise or nullcontext():
                curve = [self._step(session, position) for position in range(self.effort.course)]
            return curve, state_of(session)

        return self._unskipped(session, run)

    def _long_curve(self, session: Session, seconds: float, most: int = MOST_LONG) -> list[float]:
        """The losses of up to `most` steps of the course: it is gone on with as far as `seconds` allow."""
        restore(session, self.snapshots[0])
        seed_everything(1)
        deadline, curve = time.perf_counter() + seconds, list[float]()
        while len(curve) < most and time.perf_counter() < deadline:
            curve.append(self._step(session, len(curve)))
        return curve

    def _mean_course(self, session: Session, stream: int) -> tuple[list[float], State]:
        runs = [self._course(session, stream=stream + seed) for seed in range(self.effort.course_seeds)]
        curve = [sum(values) / len(values) for values in zip(*(run[0] for run in runs), strict=True)]
        return curve, State.mean([run[1] for run in runs])

    def _if_moved(self, found: dict[str, Any]) -> dict[str, Any]:
        """A verdict's fields; where the job's own loss is no number, or where it says kept and the job itself
        moved no weight, nothing is known.
        """
        first = next((step for step, loss in enumerate(self.standing.curve) if math.isnan(loss)), None)
        if first is not None and found["kept"] is not False:
            return unknown(NO_NUMBER.format(first))
        begin, life = self.snapshots[0].state.parameters, self.standing.life
        ends = [self.standing.end.parameters, *([life.outcome.after.parameters] if life else [])]
        models = self.session.build.models
        trained = [name for name, parameter in named_parameters(models) if parameter.requires_grad]
        moved = any(not torch.equal(end[name], begin[name]) for end in ends for name in trained)
        return unknown(UNMOVED) if found["kept"] and trained and not moved else found

    def _distances(self, outcome: Outcome, snapshot: Snapshot, reference: Outcome) -> dict[Measure, float]:
        return distances(outcome, reference, snapshot.state, snapshot.decay, self.effort.lockstep)

    def _apart(self, end: State, reference: State) -> float:
        """The distance between two ends of the course, as a fraction of the reference's way."""
        begin, mine, theirs = self.snapshots[0].state.parameters, end.parameters, reference.parameters
        gap = sum(moved_square(mine[name], t) for name, t in theirs.items())
        way = sum(moved_square(t, begin[name]) for name, t in theirs.items())
        return math.sqrt(gap / way) if way else math.inf if gap else 0.0

    def _is_unlike_itself(self, before: Outcome) -> bool:
        """Do the reference's first steps, which ended as `before`, end elsewhere when they are run again?"""
        again = self._lockstep(self.session, self.snapshots[0], stream=0)
        found = self._distances(again, self.snapshots[0], before)
        most = LIMIT * max(FINEST_ROUNDOFF, self.own_roundoff)
        return any(found[Measure(quantity)] > most for quantity in (Quantity.LOSS, Quantity.EVALUATION))


def _trained(session: Session) -> set[int]:
    """The storages of the weights that are trained; of what ranks divide, none."""
    parameters = named_parameters(session.build.models) if session.build.shards is None else []
    return storage_ids(p for _, p in parameters if p.requires_grad)
