"""A training's life in small: the ends of three epochs, every batch shape, evaluations, a resumed session.

A training is more than steps: a plan can go wrong at an evaluation, at an epoch's end, with the smaller last
batch, or in a new process, and show it only in the steps that follow. So reference and plan go through all of
these from one start, and are compared afterwards.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

import torch

from vivace import words
from vivace.data.iterable import IterableData
from vivace.data.order import isolated
from vivace.errors import CheckpointError, JobError
from vivace.job import Batch, Job
from vivace.session.session import Session
from vivace.tensors.modules import in_evaluation
from vivace.tensors.randomness import derive
from vivace.tensors.trees import tensors
from vivace.training.evaluation import Evaluation
from vivace.verifying.displacement import Outcome, State
from vivace.verifying.feeding import Loaders, Read
from vivace.verifying.figures import Measure
from vivace.verifying.judgement import LAYER_LIMIT, LIMIT, check
from vivace.verifying.skipping import num_skipped, same_values
from vivace.verifying.states import Snapshot, clone, load_state, restore, state_of

EPOCHS = 3
STEPS = 2  # batches at the end of each epoch
VALIDATED = 2  # batches that each evaluation reads
VALIDATING_SECONDS = 10.0  # at most, for the batches of one evaluation
SHAPED_EPOCHS = 2  # epochs that are searched for batches of other shapes
MOST_SHAPES = 6
# Few shadows live so long; and what goes wrong here is gross.
LIMIT_FACTOR = 2.0
WHEN = "over evaluations and epochs"

Step = Callable[[Session, Any], float]


@dataclasses.dataclass
class Course:
    """What every life brings: the last batches of each epoch, then one batch of every other shape.

    `reached`: are they the last ones, or the first of a stream? `read`: how much of the first epochs was
    looked through for shapes, in `seconds` at most. `pass_seconds`: that one took, where it was whole.
    """

    ends: list[list[Any]]
    shaped: list[Any]
    reached: list[bool] = dataclasses.field(default_factory=list)
    read: list[Read] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    pass_seconds: float | None = None
    is_stream: bool = False

    @property
    def num_steps(self) -> int:
        """The steps of one life."""
        return sum(map(len, self.ends)) + len(self.shaped)

    def ending(self, ends: Sequence[Sequence[Any]]) -> Course:
        """The same with `ends` of streams that were read to their end since; itself where nothing is new."""
        new = [bool(end) and not reached for end, reached in zip(ends, self.reached, strict=False)]
        if not any(new):
            return self
        course = dataclasses.replace(self, ends=[*self.ends], reached=[*self.reached])
        for epoch, end in enumerate(ends):
            if new[epoch]:
                course.ends[epoch], course.reached[epoch] = list(end)[-STEPS:], True
        return course


@dataclasses.dataclass
class Life:
    """What a session came to: losses and weights, and after each evaluation the state and the outputs.

    `skipped`: the steps for which a loss scale was too large; `skipped_resumed` in the resumed session.
    """

    outcome: Outcome
    evaluated: list[tuple[State, list[torch.Tensor]]]
    fault: str = ""
    skipped: int = 0
    skipped_resumed: int = 0


def course_of(
    loaders: Loaders,
    at_hand: Iterable[Any],
    seconds: float,
    agreed: Callable[[bool], bool] = lambda reached: reached,
) -> Course:
    """Read the ends of the epochs, and look through `at_hand` and the first epochs for batches of other
    shapes, as far as `seconds` reach.

    A stream shows its end to those alone who read all before it: where that was not reached, or not on every
    rank (`agreed`), its first batches stand for the last ones.
    """
    others: dict[Any, Any] = {}
    for batch in at_hand:
        others.setdefault(shape_of(batch), batch)
    course, deadline = Course([], [], seconds=seconds), time.perf_counter() + seconds
    for epoch in range(EPOCHS):
        batches = loaders.epoch(epoch)
        is_stream, reached = isinstance(batches, IterableData), loaders.has_index
        course.is_stream = is_stream
        if is_stream or epoch < SHAPED_EPOCHS:
            begin = time.perf_counter()
            first, last, read = _looked_through(batches, deadline, others)
            course.read.append(read)
            course.pass_seconds = time.perf_counter() - begin if read.whole else course.pass_seconds
        if is_stream:
            reached = agreed(read.whole)
            end = last if reached else first
        else:
            end = [batch for batch in islice(loaders.epoch(epoch, STEPS), STEPS) if batch is not None]
        course.ends.append(end)
        course.reached.append(reached)
    known = {shape_of(batch) for end in course.ends for batch in end}
    rest = [batch for shape, batch in others.items() if shape not in known]
    by_size = sorted(rest, key=lambda batch: sum(t.numel() for t in tensors(batch)))
    wanted = min(MOST_SHAPES, len(by_size))
    spread = {round(i * (len(by_size) - 1) / max(1, wanted - 1)) for i in range(wanted)}
    course.shaped = [by_size[i] for i in sorted(spread)]
    return course


def _looked_through(
    batches: Iterable[Any], deadline: float, others: dict[Any, Any]
) -> tuple[list[Any], list[Any], Read]:
    """The first and the last batches of a pass, as far as it was read; one of each shape goes to `others`."""
    first, last, number = list[Any](), deque[Any](maxlen=STEPS), 0
    for batch in batches:
        if number >= STEPS and time.perf_counter() > deadline:
            return first, list(last), Read(number, whole=False)
        number += 1
        if batch is not None:
            first += [batch] if len(first) < STEPS else []
            last.append(batch)
            others.setdefault(shape_of(batch), batch)
    return first, list(last), Read(number, whole=True)


def held_out(job: Job, seconds: float) -> list[Any]:
    """The first batch of the validation data and, where it has another shape, the last; of a stream that one
    only if its end comes within `seconds`.
    """
    if job.validation is None:
        return []
    loaders, deadline = Loaders(job, "validation"), time.perf_counter() + seconds
    batches = loaders.epoch(0)
    if isinstance(batches, IterableData):
        first, last, read = _looked_through(batches, deadline, {})
        last = last if read.whole else []
    else:
        first = list(islice((batch for batch in batches if batch is not None), 1))
        last = [batch for batch in loaders.epoch(0, 1) if batch is not None] if loaders.has_index else []
    odd = first and last and shape_of(last[-1]) != shape_of(first[0])
    return [*first[:1], *(last[-1:] if odd else [])]


class Unseen(NamedTuple):
    """What of the data the time was too short for: what bears on the answer, and all of it in figures."""

    told: tuple[str, ...] = ()
    details: tuple[str, ...] = ()


def unseen(course: Course) -> Unseen:
    """What of the data the time was too short for; empty where it was not.

    That not every batch was looked at for its shape bears on the answer only where shapes vary: in front of
    an epoch's last batches, which are known, all others of it were alike.
    """
    told, details = list[str](), list[str]()
    if not all(read.whole for read in course.read):
        each = [f"{words.number(read.batches)} of epoch {i}" for i, read in enumerate(course.read, 1)]
        took = words.duration(max(1.0, round(course.seconds)))
        details.append(f"batches of other shapes were looked for in what came in {took} ({', '.join(each)})")
        if course.shaped:
            told.append(f"shapes that come later than {took} of reading were not tried")
    if missed := [f"{i}" for i, reached in enumerate(course.reached, 1) if not reached]:
        which = ", ".join(missed)
        told.append(f"the end of epoch {which} was not reached: its first batches stood for its last")
    return Unseen(tuple(told), tuple(details))


def shape_of(batch: Batch) -> tuple[Any, ...]:
    """The shapes and dtypes of a batch's tensors."""
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors(batch))


def live(
    session: Session,
    begin: Snapshot,
    course: Course,
    step: Step,
    outputs: Callable[[Session], list[torch.Tensor]],
    seed: Callable[[], object],
    loaders: Loaders | None = None,
    evaluate: Callable[[Session], object] = lambda session: None,
    resumed: Callable[[Session], Session] | None = None,
) -> Life:
    """Go through a life from `begin`, fed from the course, or by the session's plan from `loaders`.

    `outputs` are those of the session's model in evaluation mode, as it is; `seed` begins the random streams;
    `evaluate` is what happens after each epoch. `resumed` gives a new session in the same state for the last
    one.
    """
    restore(session, begin)
    seed()
    first, before = session, num_skipped(session)
    losses, evaluated = list[float](), list[tuple[State, list[torch.Tensor]]]()
    for epoch, end in enumerate(course.ends):
        if resumed is not None and epoch == EPOCHS - 1:
            try:
                session = resumed(first)
            except CheckpointError as error:
                return Life(_outcome(losses, session), evaluated, f"it cannot be resumed: {error}")
            if lost := _forgotten(session, first):
                return Life(_outcome(losses, session), evaluated, f"a resumed run loses what '{lost}' kept")
        fed, expected = 0, len(end)
        for batch in _fed(session, loaders, epoch, end):
            losses.append(step(session, batch))
            fed += 1
        if fed != expected:
            fault = f"{fed} batches come at the end of epoch {epoch + 1}, and {expected} in the job"
            return Life(_outcome(losses, session), evaluated, fault)
        losses += [step(session, clone(batch)) for batch in (course.shaped if epoch == 1 else [])]
        evaluate(session)
        state = state_of(session)
        evaluated.append((state, outputs(session)))
        load_state(session, state)  # a model may count how often it is asked
    life = Life(_outcome(losses, session), evaluated, skipped=num_skipped(first) - before)
    life.skipped_resumed = num_skipped(session) if session is not first else 0
    return life


def checks_of(
    values: dict[Measure, float], envelopes: dict[Measure, float], roundoff: float
) -> list[dict[str, Any]]:
    """The figures of a life."""
    found = []
    for measure, value in values.items():
        limit = LIMIT_FACTOR * (LAYER_LIMIT if measure.layer else LIMIT)
        figure = check(measure, 0, value, envelopes[measure], roundoff, limit=limit)
        found.append(figure | {"name": f"{measure}, {WHEN}"})
    return found


def _fed(session: Session, loaders: Loaders | None, epoch: int, end: list[Any]) -> Iterator[Any]:
    """The end of an epoch as the session's plan feeds it; copies of `end` where no technique touches it."""
    if loaders is not None:
        loader, ends = loaders.ending(epoch, STEPS, end)
        fed = session.seams.batches(loader)
        if fed is not loader:
            batches = (b for b in isolated(lambda: fed, derive(0, epoch, "feed")) if b is not None)
            yield from islice(batches, len(end) + ends)  # one more: what a plan does behind the last runs too
            return
    yield from map(clone, end)


def _forgotten(resumed: Session, before: Session) -> str:
    """The first technique whose kept state is another one than before the resume; empty where none is."""
    for name, held in before.build.kept.items():
        again = resumed.build.kept.get(name)
        if again is None or not same_values(again.state_dict(), held.state_dict()):
            return name
    return ""


def validate(session: Session, job: Job) -> None:
    """Let the plan feed an evaluation to its end, for what it does then."""
    loaders = Loaders(job, "validation" if job.validation is not None else "data")
    loader = loaders.epoch(0, VALIDATED)
    if not loaders.has_index:
        loader, _ = loaders.ending(0, VALIDATED, list(islice(loader, VALIDATED)))
    with in_evaluation(session.build.models):
        deadline = time.perf_counter() + VALIDATING_SECONDS
        for _ in isolated(lambda: session.validation(loader), derive(0, "validation")):
            if time.perf_counter() > deadline:  # a plan may feed more than it is given
                break


class OwnMetric:
    """Lets the job's own metric look at a session's model, on a few batches, for what it changes in it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.evaluation: Evaluation | None = None
        self.batches: list[Any] = []

    def __call__(self, session: Session) -> None:
        """One evaluation, which on so few batches may say nothing."""
        self.evaluation = self.evaluation or Evaluation(self.job, session, 0, self._firsts)
        self.evaluation.session = session
        with suppress(JobError):
            self.evaluation.metric()

    def _firsts(self, loader: Iterable[Any]) -> list[Any]:
        self.batches = self.batches or list(islice(loader, VALIDATED))
        return [clone(batch) for batch in self.batches]


def _outcome(losses: list[float], session: Session) -> Outcome:
    return Outcome(losses, state_of(session), torch.zeros(1), torch.zeros(1), drew=False)
