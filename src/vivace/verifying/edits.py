"""The children's side of judging an edit: the original and the edited training, each in its own process.

They meet in files that the original writes (`Loan`: where to start, which batches, how many steps) and the
edited one answers (`Answer`). So neither sees the other's modules, settings of torch or random streams.
Parameters are matched by name, without what `torch.compile` puts before it.
"""

from __future__ import annotations

import dataclasses
import math
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from vivace.errors import InputError
from vivace.job import Job
from vivace.plan import Plan
from vivace.session.opening import checked_step
from vivace.session.session import Session
from vivace.tensors.loaders import known_length
from vivace.tensors.optimizers import unhanded
from vivace.tensors.trees import Digest, bytes_of, map_tensors
from vivace.torch_internals import compiler
from vivace.verifying import beginnings, measured, schedules
from vivace.verifying.bias import Gradient, Pair, estimates, pairs_of
from vivace.verifying.digests import Pass, compared, first_other, in_one_order, read_epochs
from vivace.verifying.displacement import State, Tensors, different_states, identical, same_streams
from vivace.verifying.effort import Effort
from vivace.verifying.evaluation import Evaluation
from vivace.verifying.facts import SHAPE, Facts, difference, facts_of_session, first_difference, known_to
from vivace.verifying.feeding import LAST_BATCHES, Loaders, Reach, limit_of, unread
from vivace.verifying.figures import Quantity
from vivace.verifying.ground import Ran
from vivace.verifying.halves import Halves, Place
from vivace.verifying.judgement import outright, unknown
from vivace.verifying.life import Course, Life, OwnMetric, unseen
from vivace.verifying.masks import Counted, Drawn, Handed, Kept, Unlike
from vivace.verifying.measured import Measured, OwnMeasure, other
from vivace.verifying.rehearsal import fault_of, same_rehearsals
from vivace.verifying.resumed import resume
from vivace.verifying.ruler import (
    MOST_RESUMED_BYTES,
    OTHER_PAIRS_STREAM,
    OTHER_STREAMS,
    UNLIKE_ITSELF,
    Ruler,
)
from vivace.verifying.runner import AGAIN_STREAM, PAIRS_STREAM, PROBE_STREAM
from vivace.verifying.schedules import WholeSchedule, whole_schedule
from vivace.verifying.shadow import FINEST_ROUNDOFF, Rounding
from vivace.verifying.states import InPython, Snapshot, clone, parameter_names, restore, state_of, strides_of
from vivace.verifying.tap import Tap

EPOCHS = 2
SCHEDULE_SECONDS = 5.0
MEASURING_SECONDS = 2.0  # of reading what a metric is evaluated on, and of as many steps
LONG_SECONDS = 10.0  # for further steps, where all of the course was equal
LATE = 2.0**-10  # relative difference of losses: after one fp32 step from equal weights it is far smaller
COMPILED_PREFIX = "_orig_mod."
WHOSE = "the original"
CHANGING_METRIC = "the original's says otherwise each time of the same weights on the same batches"
StatesByName = dict[str, dict[str, Any]]  # what optimizers keep of each parameter
Readings = dict[str, list[Pass]]  # of the Job's data and validation


@dataclasses.dataclass
class Loan:
    """What the edited training gets of the original."""

    effort: Effort
    snapshots: list[tuple[State, StatesByName, int]]  # with the number of the next batch
    batches: list[Any]
    slopes: Tensors
    rehearsed: bool
    curve: list[float]
    lives: Course
    reach: Reach
    measured: Measured | None


@dataclasses.dataclass
class Answer:
    """What the edited training did, under the names that the original has. `means`: over random streams,
    and then `draws` is what a step drew. `untrained`: a parameter that gets no gradient. `resumes_otherwise`:
    what first differs where it goes on from a checkpoint. `measured`: its metric of the weights late in the
    original's run. `hidden`: what draws its masks inside of a kernel.
    """

    ran: Ran
    facts: Facts
    modules: Facts
    beginning: State
    built_again: dict[str, Digest]
    untrained: str
    readings: Readings
    halves: dict[Place, list[bool]]
    strides: list[tuple[int, ...]]
    kept_otherwise: str
    resumes_otherwise: str
    schedule: WholeSchedule
    measured: Measured | None
    hidden: str
    means: bool = False
    draws: tuple[Counted, Counted] | None = None


@dataclasses.dataclass
class Steps:
    """What the edited training sends of one batch: the gradient of a step and, where random numbers differ,
    that of another one under others, and the masks that the first one drew.
    """

    first: Gradient
    again: Gradient | None = None
    masks: list[Drawn] = dataclasses.field(default_factory=list)


class Side(Ruler):
    """What the original and the edited training both do."""

    def _whole_schedule(self, readings: Readings) -> WholeSchedule:
        """The schedule of the whole training, alone."""
        restore(self.session, self.snapshots[0])
        first = readings["data"][0]
        known = known_length(Loaders(self.job).epoch(0)) or (len(first.batches) if first.whole else None)
        found = whole_schedule(self.job, self.session, known, SCHEDULE_SECONDS)
        restore(self.session, self.snapshots[0])
        return found

    def _resumes_otherwise(self, plain: Life) -> str:
        """What first differs in a life whose last epoch begins from a checkpoint, beside a `plain` one; empty
        where nothing does, where the job does not repeat itself, where it compiles its model, and where that
        is too large to stand in memory once more.
        """
        models, again = self.session.build.models, list[Session]()
        named = [(name, p) for model in models for name, p in model.named_parameters()]
        size = bytes_of(p for _, p in named)
        if size >= MOST_RESUMED_BYTES or any(COMPILED_PREFIX in name for name, _ in named):
            return ""

        def resumed(first: Session) -> Session:
            again.append(resume(first, lambda: self._opened(Plan(), Tap(self.job))))
            return again[0]

        try:
            found = self._live(self.session, resumed=resumed)
        finally:
            for one in again:
                one.close()
        if found.fault:
            return found.fault
        different = identical(found.outcome, plain.outcome)
        if not different or identical(self._live(self.session).outcome, plain.outcome):
            return ""
        return f"its {different[0]} differs"


class Original(Side):
    """Serves `vivace.processes.launch.Child`: prepares as for plans, lends, and weighs what comes back."""

    def lend(self, path: str) -> None:
        """Write the `Loan`. The life of both trainings is one in which their own metric evaluates."""
        self.pairs: list[Pair] | None = None  # of gradients, once they were asked for
        self.handed: list[Pair] | None = []  # under the edited training's masks; None where these do not fit
        self.evaluates = OwnMetric(self.job) if self.job.metric is not None else None
        self.metric_note = ""
        self.standing.lived = None
        # Both trainings read alone, one after the other: each has half of the time.
        self.reach = Reach(self.feeding_seconds / EPOCHS, self.stream_seconds / 2)
        self.readings = _readings(self.job, self.reach)
        snapshots = [(s.state, _by_name(self.session, s.optimizers), s.position) for s in self.snapshots]
        rehearsed = self.standing.rehearsal is not None
        curve, lives, reach = self.standing.curve, self.lives, self.reach
        self.schedule = self._whole_schedule(self.readings)
        most = int(MEASURING_SECONDS / max(1e-6, self.step_seconds))
        self.measure = OwnMeasure(self.job, self.session, most, MEASURING_SECONDS)
        self.measured = self.measure(self.snapshots[-1].state)
        lent = self.effort, snapshots, self.batches, self.slopes, rehearsed, curve, lives, reach
        torch.save(Loan(*lent, self.measured), path)

    def draw(self, path: str) -> None:
        """Write draws of the initial weights."""
        torch.save(beginnings.draw(self.job), path)

    def pair(self, number: int, path: str) -> None:
        """Take the own gradient of the batch of this number beside the edited training's, and note what both
        have in common; where random numbers differ, also under others and under the very masks of that.
        """
        mine: Steps = _read(path, self.session.build.device)

        def own(stream: int, around: AbstractContextManager[Any] | None = None) -> Gradient:
            return self._gradient(self.session, stream, number, around or nullcontext())

        def others(_: int) -> tuple[Gradient, Gradient]:
            assert mine.again is not None
            return mine.again, own(PROBE_STREAM)

        with self._standing_on(repeats=self.repeats, ordered=False):
            apart = others if mine.again is not None else None
            found = pairs_of(lambda _: mine.first, lambda _: own(PAIRS_STREAM), apart, 1)
            self.pairs = [*(self.pairs or []), *found]
            if mine.masks and self.handed is not None:
                handed = Handed([mine.masks])
                try:
                    found = pairs_of(lambda _: mine.first, lambda _: own(PAIRS_STREAM, handed), None, 1)
                    fits = handed.num_drawn == len(mine.masks)
                except Unlike:
                    fits = False
                self.handed = [*self.handed, *found] if fits else None

    def weigh(self, answer: str, roundoff: float, drawn: list[str] | None = None) -> dict[str, Any]:
        """Return the verdict's document; or under ``ask`` what is missing for one.

        ``means``: runs under other random streams. ``draws``: initial weights of both, whose files come as
        `drawn`, the edited training's first. ``gradients``: of ``count`` batches (see `pair`).
        """
        found: Answer = _read(answer, self.session.build.device)
        with self._standing_on(repeats=self.repeats, ordered=False):
            document = self._weighed(found, roundoff, drawn)
        return document if "ask" in document else document | self._fed(found, document)

    def _fed(self, found: Answer, document: dict[str, Any]) -> dict[str, Any]:
        """How much of the data was compared and looked at, as a verdict's fields."""
        both = {field: own for field, own in self.readings.items() if field in found.readings}
        fed = {field: compared(found.readings[field], own) for field, own in both.items()}
        left_out = unseen(self.lives)
        notes = [self.metric_note, *left_out.told] if document["kept"] else []
        for field, own in both.items():
            limit = limit_of(not own[0].is_stream, self.reach.stream if own[0].is_stream else self.reach.each)
            if all(map(in_one_order, found.readings[field], own)):
                limit += f", and the last {LAST_BATCHES}; the others are in one order, by their indices"
            notes += [unread(field, "epoch", fed[field], limit)] if document["kept"] else []
        reason = "; ".join(filter(None, (document["reason"], *notes)))
        passes = {field: [one.to_dict() for one in read] for field, read in fed.items()}
        return {"reason": reason, "fed": passes, "details": left_out.details}

    def _weighed(self, found: Answer, roundoff: float, drawn: list[str] | None) -> dict[str, Any]:
        ran, standing = found.ran, self.standing
        document: dict[str, Any] = {
            "promise": "rounding",
            "steps": self.effort.course + self.effort.lockstep * len(self.snapshots),
            "seeds": self.effort.seeds,
            "curves": {
                "steps": list(range(len(ran.curve))),
                "reference": standing.curve[: len(ran.curve)],
                "plan": ran.curve,
            },
        }
        if fault := self._plain_fault(found):
            return document | fault
        begun, note = [], ""
        alike = not different_states(found.beginning, self.snapshots[0].state)
        if not alike or found.built_again != beginnings.build_again(self.job):
            if drawn is None:
                return {"ask": "draws"}
            mine, theirs = (_read(path, torch.device("cpu")) for path in drawn)
            if other_begin := beginnings.first_fault(mine, theirs, WHOSE):
                return document | _fault(other_begin.text, Quantity.INITIAL, other_begin.layer)
            begun = beginnings.checks_of(mine, theirs)
            note = "initial weights are other draws: both were compared from the original's"
        if any(r.drew and not o.drew for o, r in zip(ran.outcomes, standing.references, strict=True)):
            reason = "it draws no random numbers where the original draws some: dropout or noise is off"
            return document | outright(False, reason, Quantity.DRAWS)
        if not found.means and not self._has_same_streams(found):
            return {"ask": "means"}
        ran.same_streams = not found.means
        if found.draws is not None:
            text, uncounted = self._fault_of_draws(found.draws, "it")
            if text:
                return document | outright(False, text, Quantity.DRAWS)
            note = "; ".join(filter(None, (note, uncounted)))
        for outcome in ran.outcomes:
            outcome.outputs = self.evaluation(self.session, outcome.after)
        if not begun and ran.same_streams and self._is_identical(ran):
            if self._is_measured(found) and (text := other(found.measured, self.measured, WHOSE)):
                return document | _fault(text, Quantity.METRIC, None)
            return document | self._if_moved(self._gone_on_with(ran))
        count = self._num_pairs(ran)
        if count and self.pairs is None:
            return {"ask": "gradients", "count": count, "apart": found.means}
        ran.biases, ran.num_pairs = estimates(self.pairs or []), len(self.pairs or [])
        ran.handed = estimates(self.handed or [])
        document["bias"] = {"pairs": ran.num_pairs, "not_tested": self._why_no_bias(ran)}
        begun += self._metric_checks(found, max(roundoff, FINEST_ROUNDOFF))
        self.halves[Plan().id] = found.halves if roundoff > FINEST_ROUNDOFF else {}
        return document | self._if_moved(self._compare(ran, max(roundoff, FINEST_ROUNDOFF), note, begun))

    def _is_measured(self, found: Answer) -> bool:
        """Do both have a metric, and does the original's depend on nothing but weights and batches?"""
        if found.measured is None or self.measured is None:
            return False
        state = self.snapshots[-1].state
        again = [self.measure(state, seed) for seed in (0, 1)]
        repeats = all(one is not None and one.value == self.measured.value for one in again)
        self.metric_note = "" if repeats else f"the metric was not compared: {CHANGING_METRIC}"
        return repeats

    def _metric_checks(self, found: Answer, roundoff: float) -> list[dict[str, Any]]:
        if not self._is_measured(found):
            return []
        assert found.measured is not None
        assert self.measured is not None
        state = self.snapshots[-1].state
        noises = (Rounding(roundoff, seed=49_000 + seed, halves={}) for seed in range(measured.SHADOWS))
        shadows = [self.measure(state, around=noise) for noise in noises]
        return [measured.check_of(found.measured, self.measured, [one for one in shadows if one is not None])]

    def _plain_fault(self, found: Answer) -> dict[str, Any]:
        """What is plainly otherwise, and needs no envelope, as a verdict's fields."""
        for mine, theirs, only_shared in (
            (found.facts, known_to(found.facts, self.facts | facts_of_job(self.job)), False),
            (found.modules, self.modules or {}, True),
        ):
            name = first_difference(mine, theirs, only_shared=only_shared)
            if name:
                text = difference(mine, theirs, only_shared=only_shared, whose=WHOSE)
                quantity, _, layer = name.partition(" of ")
                return _fault(text, quantity, layer or None)
        if gone := [name for name in facts_of_job(self.job) if name not in found.facts]:
            return _fault(f"it has no {gone[0]}, and {WHOSE} has", gone[0], None)
        for field, reading in self.readings.items():
            text, number = first_other(found.readings[field], reading, field)
            if not text:
                continue
            if first_other(_readings(self.job, self.reach)[field], reading, field)[0]:
                return unknown(f"the {field} come otherwise each time that they are read: a seed is missing")
            return _fault(f"{text} in {WHOSE}", field, None, number)
        text, number = schedules.first_other(found.schedule, self.schedule, WHOSE)
        if text:
            return _fault(text, "schedule", None, number)
        ours, others = found.ran.rehearsal, self.standing.rehearsal
        if ours is not None and others is not None and (text := fault_of(ours, others)):
            return unknown(UNLIKE_ITSELF) if self._rehearses_otherwise() else _fault(text, "rehearsal", None)
        if found.untrained:
            text = f"{found.untrained} gets no gradient, and in {WHOSE} it does"
            return _fault(text, Quantity.GRADIENT_SCALE, found.untrained)
        if found.resumes_otherwise and not self._resumes_otherwise(self._live(self.session)):
            text = f"gone on from a checkpoint it trains on otherwise, as {WHOSE} does not"
            return _fault(f"{text}: {found.resumes_otherwise}", "resume", None)
        if self.measured is not None and found.measured is None:
            text = f"its metric fails on batches on which it does not in {WHOSE}"
            return _fault(text, Quantity.METRIC, None)
        return unknown(found.kept_otherwise) if found.kept_otherwise else {}

    def _has_same_streams(self, found: Answer) -> bool:
        rearranged = found.strides != strides_of(self.session)
        pairs = zip(found.ran.outcomes, self.standing.references, strict=True)
        same = all(same_streams(o, r, rearranged) for o, r in pairs)
        return same and not (found.hidden and found.hidden != self._counted_draws(self.session)[0].hidden)

    def _is_identical(self, ran: Ran) -> bool:
        standing = self.standing
        pairs = zip(ran.outcomes, standing.references, strict=True)
        alike = not any(identical(o, r) for o, r in pairs) and ran.curve == standing.curve
        alike = alike and same_rehearsals(ran.rehearsal, standing.rehearsal)
        assert ran.life is not None
        assert standing.life is not None
        alike = alike and not identical(ran.life.outcome, standing.life.outcome)
        seen = [(ran.end, ran.evaluated[0]), *((state, outputs[0]) for state, outputs in ran.life.evaluated)]
        return alike and all(torch.equal(mine, self.evaluation(self.session, state)) for state, mine in seen)

    def _gone_on_with(self, ran: Ran) -> dict[str, Any]:
        """A verdict's fields on an edit whose steps were all equal so far: does a later one differ?"""
        theirs = self._long_curve(self.session, 2 * LONG_SECONDS, len(ran.long_curve))
        both = enumerate(zip(ran.long_curve, theirs, strict=False))
        found = next(((step, *pair) for step, pair in both if str(pair[0]) != str(pair[1])), None)
        if found is None:
            steps = max(len(theirs), self.effort.course)
            return {"promise": "exact", "steps": steps, **outright(True, "", Quantity.BITS)}
        step, mine, other = found
        if abs(mine - other) <= LATE * abs(other):
            reason = f"from step {step} on the losses differ by rounding; all before are equal bit for bit"
            return outright(True, reason, Quantity.BITS)
        text = (
            f"the loss of step {step} is {mine:.4g} instead of {other:.4g}; all before are equal bit for bit"
        )
        return _fault(text, "loss", None, step)


class Edited(Side):
    """Serves `vivace.processes.launch.Child`: runs the edited training from where the original lent."""

    def run(self, loan: str, path: str, notes_halves: bool) -> None:
        """Write the `Answer`. Raises InputError where the parameters are not the original's."""
        self.session = session = self._opened(Plan(), self.tap)
        self.names = _names(session)
        lent: Loan = renamed(_read(loan, session.build.device), self.names)
        self.effort, self.slopes = lent.effort, lent.slopes
        self.batches = map_tensors(lent.batches, torch.Tensor.cpu)
        self.lives = dataclasses.replace(
            lent.lives,
            ends=map_tensors(lent.lives.ends, torch.Tensor.cpu),
            shaped=map_tensors(lent.lives.shaped, torch.Tensor.cpu),
        )
        self.evaluates = OwnMetric(self.job) if self.job.metric is not None else None
        self.untrained = ""
        facts = facts_of_session(session)
        _require_same_parameters(facts, lent)
        beginning = state_of(session)
        self.evaluation = Evaluation(self.job, session.place(self._last_batch()))
        self.snapshots = [
            Snapshot(state, _as_kept(session, by_name), position, {})
            for state, by_name, position in lent.snapshots
        ]
        python = InPython.of(session, self.job)
        with compiler.equal_random_numbers():
            kept_otherwise = self._keeps_otherwise(lent)
            python.put_back(session)
            self._note_python()
            ran = Ran() if kept_otherwise else self._ran(lent)
            halves = self._halves() if notes_halves else {}
            otherwise = self._resumes_otherwise(ran.life) if ran.life is not None else ""
        facts |= facts_of_job(self.job)
        modules, readings = self.tap.modules or {}, _readings(self.job, lent.reach)
        begun = beginning, beginnings.build_again(self.job), self.untrained
        found = facts, modules, *begun, readings, halves, strides_of(session), kept_otherwise, otherwise
        lately = None
        if lent.measured is not None:
            measure = OwnMeasure(self.job, session, lent.measured.batches, math.inf)
            lately = measure(self.snapshots[-1].state)
        drew = any(outcome.drew for outcome in ran.outcomes)
        hidden = self._counted_draws(session)[0].hidden if drew else ""
        self.answer = Answer(ran, *found, self._whole_schedule(readings), lately, hidden)
        self._write(path)

    def run_means(self, path: str) -> None:
        """Run again under several random streams, and write the `Answer` with their means."""
        ran, session = self.answer.ran, self.session
        with compiler.equal_random_numbers():
            ran.outcomes = [self._mean_lockstep(session, s, OTHER_STREAMS) for s in self.snapshots]
            ran.curve, ran.end = self._mean_course(session, OTHER_STREAMS)
            ran.evaluated = [self.evaluation(session, ran.end)]
            assert ran.life is not None
            ran.life = self._mean_life(session, OTHER_STREAMS, ran.life)
        self.answer.means = True
        self.answer.draws = self._counted_draws(session)
        self._write(path)

    def gradient(self, number: int, path: str, apart: bool) -> None:
        """Write the gradient of a step on the batch of this number, from the middle of the original's run;
        `apart`, where random numbers differ, under two streams, and with the masks of the first.
        """
        session, kept = self.session, Kept()
        with compiler.equal_random_numbers():
            if apart:
                found = Steps(self._gradient(session, OTHER_PAIRS_STREAM, number, kept))
                found.again = self._gradient(session, AGAIN_STREAM, number, nullcontext())
                found.masks = [] if kept.hidden else kept.pieces[0]
            else:
                found = Steps(self._gradient(session, PAIRS_STREAM, number, nullcontext()))
        torch.save(renamed(found, _inverse(self.names)), path)

    def draw(self, path: str) -> None:
        """Write draws of the initial weights."""
        torch.save(renamed(beginnings.draw(self.job), _inverse(self.names)), path)

    def _write(self, path: str) -> None:
        torch.save(renamed(self.answer, _inverse(self.names)), path)

    def _ran(self, lent: Loan) -> Ran:
        session, ran = self.session, Ran()
        ran.outcomes = [self._lockstep(session, self.snapshots[0], stream=0)]
        if lent.rehearsed:
            ran.rehearsal = self._rehearse(session, self.tap, self.effort.rehearsal)
        rest = list(enumerate(self.snapshots))[1:]
        ran.outcomes += [self._lockstep(session, s, stream=i) for i, s in rest]
        ran.curve, ran.end = self._course(session)
        ran.evaluated = [self.evaluation(session, ran.end)]
        ran.life = self._live(session, outputs=self.evaluation.as_it_is)
        if ran.curve == lent.curve:
            ran.long_curve = self._long_curve(session, LONG_SECONDS)
        return ran

    def _keeps_otherwise(self, lent: Loan) -> str:
        """Why an optimizer cannot go on from what the original's has kept; empty where it can.

        What of that it keeps nothing of after the same batches, though of others it does, is `untrained`.
        """
        _, kept_by, position = lent.snapshots[-1]
        restore(self.session, self.snapshots[0])
        mine: StatesByName = {}
        for batch in self.batches[: max(1, position)]:
            checked_step(self.session, clone(batch))
            mine = _by_name(self.session, [o.state_dict() for o in self.session.optimizers])
            if all(mine.get(name) for name, theirs in kept_by.items() if theirs):
                break
        if unhanded(self.session.optimizers):
            return "an optimizer holds another one, whose state no other job is handed: ask for the metric"
        alike = any(set(mine.get(name, {})) == set(theirs) for name, theirs in kept_by.items() if theirs)
        for name, theirs in kept_by.items():
            if alike and theirs and not mine.get(name):
                self.untrained = name
            if set(mine.get(name, {})) != set(theirs):
                kept = [", ".join(sorted(keys)) or "nothing" for keys in (mine.get(name, {}), theirs)]
                return (
                    f"the optimizer keeps {kept[0]} of {name}, and {kept[1]} in {WHOSE}: they cannot go on "
                    "from one point; ask for the metric"
                )
        return ""

    def _halves(self) -> dict[Place, list[bool]]:
        restore(self.session, self.snapshots[0])
        noted = Halves()
        with noted:
            self._step(self.session, 0)
        return noted.places()


def facts_of_job(job: Job) -> Facts:
    """What a Job states beside its functions."""
    names = ("epochs", "scheduler_every", "damaged")
    given = [name for name in ("metric", "validation") if getattr(job, name) is not None]
    facts = {name: getattr(job, name) for name in names} | {"has its own step": job.step is not None}
    return facts | dict.fromkeys(given, "given")


def renamed(thing: object, names: dict[str, str]) -> Any:
    """A copy of nested dataclasses, lists and dicts whose text keys are called as `names` says.

    In a key such as ``lr of head.weight`` the last word is the name.
    """

    def new(key: object) -> Any:
        before, of, name = key.rpartition(" of ") if isinstance(key, str) else ("", "", key)
        return before + of + names[name] if name in names else key

    if isinstance(thing, dict):
        return {new(key): renamed(value, names) for key, value in thing.items()}
    if isinstance(thing, (list, tuple)) and not hasattr(thing, "_fields"):
        return type(thing)(renamed(item, names) for item in thing)
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        fields = {f.name: renamed(getattr(thing, f.name), names) for f in dataclasses.fields(thing) if f.init}
        return dataclasses.replace(thing, **fields)
    return thing


def _names(session: Session) -> dict[str, str]:
    """From the original's names of parameters and buffers to the session's."""
    state = state_of(session)
    return {name.replace(COMPILED_PREFIX, ""): name for name in [*state.parameters, *state.buffers]}


def _inverse(names: dict[str, str]) -> dict[str, str]:
    return {mine: theirs for theirs, mine in names.items()}


def _read(path: str, device: torch.device) -> Any:
    return torch.load(Path(path), map_location=device, weights_only=False)  # our own files


def _readings(job: Job, reach: Reach) -> Readings:
    fields = ["data", *(["validation"] if job.validation is not None else [])]
    return {field: read_epochs(job, field, EPOCHS if field == "data" else 1, reach) for field in fields}


def _by_name(session: Session, saved: list[dict[str, Any]]) -> StatesByName:
    """What state dictionaries of the session's optimizers hold of each parameter."""
    names, found = parameter_names(session), dict[str, dict[str, Any]]()
    for optimizer, state in zip(session.optimizers, saved, strict=True):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        kept = state["state"].items()
        found |= {names[id(parameters[i])]: held for i, held in kept if id(parameters[i]) in names}
    return found


def _as_kept(session: Session, by_name: StatesByName) -> list[dict[str, Any]]:
    """State dictionaries for the session's optimizers, with their own groups and what `by_name` holds."""
    names, found = parameter_names(session), []
    for optimizer in session.optimizers:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        kept = {i: by_name[names[id(p)]] for i, p in enumerate(parameters) if names.get(id(p)) in by_name}
        found.append({"state": kept, "param_groups": optimizer.state_dict()["param_groups"]})
    return found


def _require_same_parameters(facts: Facts, lent: Loan) -> None:
    state = lent.snapshots[0][0]
    theirs = {SHAPE + n: tuple(t.shape) for n, t in [*state.parameters.items(), *state.buffers.items()]}
    mine = {name: shape for name, shape in facts.items() if name.startswith(SHAPE)}
    if mine != theirs:
        text = difference(mine, theirs, whose=WHOSE)
        raise InputError(
            f"the edited model has other parameters or buffers ({text}); they are matched by their names, "
            "which an edit must leave as they are"
        )


def _fault(reason: str, quantity: str, layer: str | None, step: int = 0) -> dict[str, Any]:
    first = {"quantity": quantity, "layer": layer, "step": step}
    return {**outright(False, reason, Quantity.FACTS), "first": first}
