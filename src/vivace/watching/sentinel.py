"""The sentinel: while a run trains under a plan, steps are repeated under the reference and compared.

`verify` proves a plan in a rehearsal. This proves it in the run itself, for what begins late, comes rarely,
or waits for an evaluation, another epoch or a resumed run.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch

from vivace.errors import ran_out_of_memory
from vivace.inspection.limits import free_memory, peak_memory
from vivace.job import Batch, Job
from vivace.machine import Machine
from vivace.plan import Plan
from vivace.profiling.record.signals import raised_by_handler
from vivace.session.session import Session
from vivace.technique import Numerics
from vivace.tensors import randomness
from vivace.tensors.outside import assign
from vivace.tensors.trees import same_numbers, tensors
from vivace.training.checkpoints import Position
from vivace.training.progress import Progress
from vivace.training.watch import Broken
from vivace.verifying.displacement import Outcome, State, Tensors, different_states, distances, resolution
from vivace.verifying.facts import difference
from vivace.verifying.figures import Measure
from vivace.verifying.halves import Place
from vivace.verifying.masks import Handed, Kept, Unlike
from vivace.verifying.shadow import FINEST_ROUNDOFF, Rounding
from vivace.watching.between import Digests, Rest, changed, digests, told
from vivace.watching.findings import MOST_SHADOWS, STEP_LIMIT, Envelopes, Finding, judged
from vivace.watching.own_metric import OwnMetric
from vivace.watching.schedule import Schedule
from vivace.watching.settings import Settings, untouched
from vivace.watching.tally import Tally
from vivace.watching.twin import (
    Before,
    LeavesATrace,
    Seen,
    Twin,
    free,
    named,
    outcome_of,
    outside_of,
    placing,
    seen,
    versions_of,
)

NO_PLAN = "the run has no plan"
NO_ROOM = "the memory does not hold the model a second time"
OnBroken = Literal["stop", "fallback", "ignore"]
FIRST_SHADOWS = 3
SHADOW_EVERY = 4  # watched steps, once as many shadows are known as are kept
NO_DRAWS = "the plan draws no random numbers where the job draws some: dropout or noise is off"
OTHER_BATCH = "the plan gives the loss another batch than the job's data gave"
WROTE_LARGE = "a step changes a tensor outside of the model that is too large to be put back"
SHARES = "a tensor outside of the model shares memory with the model's own"
CONFIRMED_BY, AMONG = 5, 10  # so many of the last watched steps, where none proves a fault alone


class Sentinel:
    """Watches the run of a job under a plan (see `vivace.training.watch.Watch`).

    Args:
        job, plan, machine, seed, ranks: of the run; no plan where one is sought while it trains.
        on_broken: `stop` the run before the broken step, `fallback` to the reference from there on, or
            `ignore` it and only write it down.
        share: what watching may take of the run's time.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan | None,
        machine: Machine,
        *,
        seed: int,
        ranks: int,
        on_broken: OnBroken,
        share: float,
    ) -> None:
        self.job, self.seed, self.on_broken = job, seed, on_broken
        self.schedule = Schedule(share)
        self.twin: Twin | None = None
        self.session: Session | None = None
        self.progress: Progress | None = None
        self.why_not, self.unseen = "", "no step was left to take"
        self.tally = self.tally_before = Tally()  # with and without the last watched step
        self.shadow_seed = 0
        self.suspected: dict[int, int] = {}  # steps off lately, and how many were watched until then
        self.envelopes = Envelopes()
        self.halves: dict[Place, list[bool]] | None = None
        self.places_alike: bool | None = None  # does the plan place a batch as the job does?
        self.rest: Rest | None = None  # since the last step, where it is looked at what follows that
        self.just_watched = False
        self.metric, self.settings = OwnMetric(job, seed), Settings()
        _import_what_optimizers_need()
        began = time.monotonic()
        if plan is not None and not plan.techniques:
            self.why_not = NO_PLAN
        elif job.step is not None:
            self.why_not = "your own step function may do anything, and cannot be repeated"
        elif ranks > 1:
            self.why_not = "several ranks train together, and each sees a part of the batch"
        elif plan is not None and plan.promise == Numerics.SEMANTICS:
            self.why_not = "the plan changes the method"
        else:
            self._attempt(lambda: setattr(self, "twin", Twin(job, machine, seed)))
        self.setup_seconds = time.monotonic() - began

    @property
    def seconds(self) -> float:
        """What watching has taken of the run so far."""
        return self.schedule.spent

    def begin(self, progress: Progress, total_steps: int | None) -> None:
        """The run begins: from here on what watching takes is held against its time."""
        self.progress = progress
        self.schedule = Schedule(self.schedule.share, total_steps)
        self.schedule.spent = self.setup_seconds
        self.schedule.began -= self.setup_seconds
        if self.why_not and self.why_not != NO_PLAN:
            progress.tell("unwatched", text=f"not watched: {self.why_not}")

    def step(self, session: Session, position: Position, batch: Batch, take: Callable[[Any], Any]) -> Any:
        """The step as it is, and where it is due a look at it. Raises Broken (see there)."""
        if self.twin is None:
            return take(batch)
        self.wakes(session, position)
        begin, self.rest = time.perf_counter(), None
        if session is not self.session:
            self._meet(session)
        shape = tuple(tensor.shape for tensor in tensors(batch))
        why = self.schedule.due(position.step + 1, position.batch, shape)
        if not why or self.twin is None or not self._has_room(session):
            self.schedule.spent += time.perf_counter() - begin  # of tiny steps that is a part, too
            return take(batch)
        return self._watched_step(session, position, batch, take, why)

    def resumes(self, session: Session, position: Position, held: object, exact: bool) -> None:
        """Go on counting where `holds` had left off; compare with the digests that it had left in the
        checkpoint, where it had, and note from here on what the session holds.
        """
        self.tally = Tally.of(held)
        if self.twin is None or not session.plan.techniques:
            return
        self._meet(session)
        if self.twin is None:
            return
        begin = time.perf_counter()
        found = held if exact and isinstance(held, dict) and held.get("step") == position.step else {}
        then: Digests = found["digests"] if isinstance(found.get("digests"), dict) else {}
        now: Digests = (self._attempt(lambda: digests(session)) if then else None) or {}
        self.schedule.rested(time.perf_counter() - begin)
        if now and (names := changed(then, now)):
            where = f"the resumed run does not begin with what step {position.step} left"
            self._changed(f"{where}: {told(names[0], then, now)}", position.step)
        self._lie_down(session, position)

    def rests(self, session: Session, position: Position, *, ends: bool) -> None:
        """Note what the session holds where a look at it is due: at an end, and after a watched step."""
        ends = ends or position.batch - 1 == self.schedule.end
        due, self.just_watched = ends or self.just_watched, False
        if self.twin is None or session is not self.session or not due or not self.schedule.can_rest():
            return
        if self.rest is None:
            self._lie_down(session, position)

    def wakes(self, session: Session, position: Position) -> None:
        """Compare with what was noted; see `Watch.wakes`."""
        rest = self.rest
        if rest is None or rest.session is not session or self.twin is None:
            return
        begin = time.perf_counter()
        now = self._attempt(lambda: digests(session))
        names = [] if now is None else changed(rest.digests, now)
        names = self.metric.unexplained(names)
        if names and self.metric.may_be_asked:
            twin = self.twin
            self._attempt(lambda: self.metric.ask(session, twin, rest))
            names = self.metric.unexplained(names)
        self.tally.between_steps += 1
        self.schedule.rested(time.perf_counter() - begin)
        if self.twin is None or now is None:
            return
        if names:
            what = told(names[0], rest.digests, now)
            self.rest = None
            self._changed(f"what step {rest.step} left was changed before the next: {what}", rest.step, rest)
            self._lie_down(session, position)
        if self.twin is not None and self.twin.schedules_freely:
            self.rest = None  # a schedule of the person's own comes next, and may change anything

    def holds(self, session: Session, position: Position) -> dict[str, Any]:
        """What was seen up to here and the digests of what the session holds, for a run that goes on from
        here.
        """
        found: Digests | None = None
        if self.twin is not None and session is self.session and self.schedule.can_rest():
            begin = time.perf_counter()
            found = self._attempt(lambda: digests(session))
            self.schedule.rested(time.perf_counter() - begin)
        # A run that stops before a broken step will take that step again, and watch it.
        again = self.tally.last_step > position.step and self.on_broken != "fallback"
        tally = self.tally_before if again else self.tally
        held = {"step": position.step, "watched": tally.with_process(self.schedule).to_dict()}
        return held | ({"digests": found} if found is not None else {})

    def aside(self) -> None:
        """Between two steps nothing of a look stands in the run."""

    def end(self) -> None:
        """The twin goes with the run."""

    def found(self) -> dict[str, Any]:
        """Empty: it seeks no faster plan."""
        return {}

    def to_dict(self) -> dict[str, Any] | None:
        """What was seen in the whole run; None where there was no plan to watch."""
        if self.why_not == NO_PLAN and self.tally.is_empty:
            return None
        whole = self.tally.with_process(self.schedule)
        return {
            "steps": whole.steps,
            "kept": whole.kept,
            "worst": whole.worst if math.isfinite(whole.worst) else None,
            "limit": STEP_LIMIT,
            "worst_figure": whole.worst_figure,
            "worst_step": whole.worst_step,
            "broken_steps": whole.broken_steps,
            "between_steps": whole.between_steps,
            "not_watched": self.why_not,
            "share": whole.share,
            "seconds": whole.seconds,
            "sentence": self.sentence(),
        }

    def sentence(self) -> str:
        """What was seen, for a person."""
        if self.tally.is_empty:
            return f"not watched: {self.why_not or self.unseen}"
        return self.tally.with_process(self.schedule).sentence(self.schedule.share, self.why_not)

    def _meet(self, session: Session) -> None:
        """Another session: the run begins, or goes on under another plan."""
        self.session = session
        self.envelopes, self.halves, self.places_alike = Envelopes(), None, None
        self.schedule.again()
        assert self.twin is not None
        if not session.plan.techniques:
            self._end("the run goes on under the reference")
        elif session.promise == Numerics.SEMANTICS:
            self._end(f"the plan changes the method ({'; '.join(session.build.declared)})".replace(" ()", ""))
        elif self.twin.is_part_of(session):
            self._end("the Job's model() returns one and the same model each time")

    def _end(self, reason: str) -> None:
        """Watch no more, told once."""
        self.why_not, self.twin = reason, None
        if self.progress is not None:
            self.progress.tell("unwatched", text=f"not watched: {reason}")

    def _lie_down(self, session: Session, position: Position) -> None:
        """Note what the session holds, where there is room for a copy of it."""
        self.rest = None
        if self._has_room(session):
            begin = time.perf_counter()
            self.rest = self._attempt(lambda: Rest(session, position.step))
            self.schedule.rested(time.perf_counter() - begin)

    def _changed(self, fault: str, step: int, rest: Rest | None = None) -> None:
        """Answer for what the plan has changed after a step; `rest` can put it back."""
        assert self.progress is not None
        record = {"step": step, "watch_score": None, "watch_figure": "what is held between steps"}
        self.progress.log("watch", record | {"watch_why": "the next step begins", "watch_kept": False})
        self._break(fault, step, rest.put_back if rest is not None else lambda: None)

    def _has_room(self, session: Session) -> bool:
        """Is as much of the host's memory free as the process took at most? A repetition takes such a step
        again. Where that is not so, nothing is watched any more: the system would end the process unasked.
        """
        if session.build.device.type == "cpu" and free_memory() < peak_memory():
            self._end(NO_ROOM)
        return self.twin is not None

    def _attempt(self, function: Callable[[], Any]) -> Any:
        """What `function` gives; None where it fails, for then the training goes on unwatched."""
        try:
            return function()
        except Unlike as unlike:
            self._end(str(unlike))
        except Exception as error:
            if raised_by_handler(error):
                raise
            if ran_out_of_memory(error):
                traceback.clear_frames(error.__traceback__)  # they hold tensors
                self._end(NO_ROOM)
                free()
            else:
                text = (str(error).strip() or "no reason given").splitlines()[0]
                self._end(f"repeating a step failed: {type(error).__name__}: {text}")
        return None

    def _watched_step(
        self, session: Session, position: Position, batch: Batch, take: Callable[[Any], Any], why: str
    ) -> Any:
        clock, device, twin = time.perf_counter, session.build.device, self.twin
        assert twin is not None
        begin = clock()
        before = self._attempt(lambda: Before.of(session, twin, position.step))
        if before is not None:
            self._attempt(lambda: before.require_repeatable(twin))
        if before is None or self.twin is None:
            return take(batch)
        skipped = session.build.facts.skipped_steps
        skipped_before = None if skipped is None else int(skipped)
        kept = None if session.plan.is_opaque else Kept()
        usual, prepared = self.schedule.step_seconds, clock()
        looking = seen(session, kept.begin_piece if kept else lambda: None)
        with looking as found, placing(session, found), kept or nullcontext():
            loss = take(batch)
        value, ended = float(torch.as_tensor(loss).detach()) if loss is not None else None, clock()
        if value is None:
            return loss
        after, outside = randomness.capture(device), self._attempt(lambda: outside_of(session, twin))
        try:
            skips = skipped is not None and int(session.build.facts.skipped_steps or 0) != skipped_before
            if skips and not self.tally.steps:
                self.unseen = "the loss scale skipped the steps that were to be watched"
                self.schedule.again()
            finding = None
            if outside is not None and not skips and self._has_room(session):
                judged = partial(self._judge, session, batch, before, found, kept, loss, after)
                finding = self._attempt(judged)
        finally:
            randomness.restore(after, device)
            if outside is not None:
                self._attempt(outside.put_back)
        slower = max(0.0, ended - prepared - usual) if usual is not None else 0.0
        self.schedule.watched(prepared - begin + slower + clock() - ended, why)
        self.just_watched = True
        if finding is not None:
            self._note(session, position, before, finding, why)
        return loss

    def _judge(
        self,
        session: Session,
        batch: Batch,
        before: Before,
        found: Seen,
        kept: Kept | None,
        loss: object,
        after: dict[str, Any],
    ) -> Finding | None:
        """Repeat the step under the reference, and compare with what the plan's step left."""
        twin = self.twin
        assert twin is not None
        if found.fault is not None:
            raise found.fault
        self._require_comparable(kept, before, after)
        if any(p.grad is not None for model in session.build.models for p in model.parameters()):
            raise Unlike("gradients stay from step to step, of weights that its optimizer does not update")
        mine = outcome_of(loss, State(*named(session)), found.gradients)
        with contextlib.ExitStack() as stack:
            stack.enter_context(untouched(session.optimizers))
            if self.halves is None:
                self.halves = twin.halves(session.plan, before, found.batch)
            again = stack.enter_context(twin.entered())
            if not self._places_alike(again.place(batch), batch, found):
                return Finding(False, math.inf, "batch", OTHER_BATCH)
            silent = kept is not None and not any(kept.pieces)
            try:
                theirs = self._repeat(before, found, kept)
            except Unlike as unlike:
                if not silent or isinstance(unlike, LeavesATrace):
                    raise
                fault = difference(found.modules or {}, twin.modules or {}, only_shared=True)
                return Finding(False, math.inf, "random numbers", fault or NO_DRAWS)
            self._require_alone(session, after)
            fault = difference(found.modules or {}, twin.modules or {}, only_shared=True)
            if fault := fault or self.settings.fault(session, twin, before):
                return Finding(False, math.inf, "settings", fault)
            if mine.losses == theirs.losses and not different_states(mine.after, theirs.after):
                return Finding(True, 0.0, "equal bits")
            return self._compare(session, before, found, kept, mine, theirs)

    def _compare(
        self,
        session: Session,
        before: Before,
        found: Seen,
        kept: Kept | None,
        mine: Outcome,
        theirs: Outcome,
    ) -> Finding:
        """The step's distances from the reference against those of shadows of this step and earlier ones."""
        device, snapshot = session.build.device, before.snapshot
        start = State(_on(device, snapshot.state.parameters), _on(device, snapshot.state.buffers))
        roundoff = max(session.build.unit_roundoff, FINEST_ROUNDOFF)
        theirs.gradients = _on(device, theirs.gradients)

        def apart(outcome: Outcome) -> dict[Measure, float]:
            outcome.gradients = _on(device, outcome.gradients)
            return distances(outcome, theirs, start, snapshot.decay, 1)

        def shadow() -> dict[Measure, float]:
            self.shadow_seed += 1
            noise = Rounding(roundoff, seed=self.shadow_seed, halves=self.halves or {})
            return apart(self._repeat(before, found, kept, noise))

        figures, smallest = apart(mine), resolution(theirs, start)
        known, watched = self.envelopes.num, self.tally.steps
        more = FIRST_SHADOWS if not known else int(known < MOST_SHADOWS or watched % SHADOW_EVERY == 0)
        for _ in range(max(1, more)):  # of a first step, until it is clear
            if more:
                self.envelopes.add(shadow())
            finding = judged(figures, self.envelopes, smallest, roundoff)
            if finding.clear:
                return finding
        own = Envelopes()  # so near to the limits, this very step decides
        for _ in range(MOST_SHADOWS):
            own.add(shadow())
        return judged(figures, own, smallest, roundoff)

    def _repeat(
        self, before: Before, found: Seen, kept: Kept | None, noise: Rounding | None = None
    ) -> Outcome:
        assert self.twin is not None
        if kept is None:
            return self.twin.run(before, found.batch, noise=noise)
        handed = Handed(kept.pieces)
        outcome = self.twin.run(before, found.batch, draws=handed, noise=noise)
        if handed.num_drawn != len(kept.pieces[0]):
            raise Unlike("the plan draws more random numbers than the job")
        return outcome

    def _places_alike(self, theirs: Batch, batch: Batch, found: Seen) -> bool:
        """False where a plan that put a batch on the device as the job does, on the run's first watched step,
        gives the loss less of this one, or other numbers in the same shapes.
        """
        mine, own = list(tensors(found.batch)), list(tensors(theirs))
        pairs = list(zip(mine, own, strict=False))
        less = any(len(a) < len(b) for a, b in pairs if a.dim() and b.dim())
        edited = versions_of(batch) != found.versions  # by the loss: then its numbers tell nothing
        other = any(a.shape == b.shape and not same_numbers(a, b.to(a.device, a.dtype)) for a, b in pairs)
        if self.places_alike is None:
            same = len(mine) == len(own) and all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in pairs)
            self.places_alike = same and not other and not found.placing_drew
        return not self.places_alike or not (less or (other and not edited))

    def _require_comparable(self, kept: Kept | None, before: Before, after: dict[str, Any]) -> None:
        if before.outside.shares:
            raise Unlike(SHARES)
        if before.wrote_large():
            raise Unlike(WROTE_LARGE)
        before.require_unwritten()
        if self.twin is not None:
            self.twin.require_known_freezing(before)
        if kept is not None and kept.hidden:
            raise Unlike(f"the job draws random numbers by {kept.hidden}")
        if kept is None and not _same_streams(before.streams, after, ("torch", "cuda")):
            raise Unlike(
                "the random numbers that compiled code or a captured graph draws cannot be drawn again"
            )

    def _require_alone(self, session: Session, after: dict[str, Any]) -> None:
        """Raises Unlike where the repetition drew otherwise, or reached into the training itself."""
        now = randomness.capture(session.build.device)
        if not _same_streams(now, after, ("python", "numpy")):
            raise Unlike("the plan draws other random numbers from Python or NumPy")
        touched = [p for model in session.build.models for p in model.parameters() if p.grad is not None]
        if touched:
            for parameter in touched:
                parameter.grad = None
            raise Unlike("the loss uses a model of its own, and not the one that it is given")

    def _note(self, session: Session, position: Position, before: Before, finding: Finding, why: str) -> None:
        """Write down what was found; raises Broken where the run must not go on so."""
        step = position.step + 1
        assert self.progress is not None
        if finding.kept is None:
            self.unseen = finding.fault
            return
        self.tally_before = copy.deepcopy(self.tally)
        self.tally.add(finding, step)
        score = finding.score if math.isfinite(finding.score) else None
        record = {"step": step, "watch_score": score, "watch_figure": finding.figure, "watch_why": why}
        self.progress.log("watch", record | {"watch_kept": finding.kept})
        watched = self.tally.steps
        self.suspected = {off: count for off, count in self.suspected.items() if watched - count < AMONG}
        if finding.kept:
            return
        self.suspected[step] = watched
        if not finding.outright and len(self.suspected) < CONFIRMED_BY:
            self.schedule.again()  # rounding may do that once, but not at every step
            return

        def put_back() -> None:
            assert self.twin is not None
            own = {key: before.attributes[key] for key in self.twin.moving if key in before.attributes}
            before.put_back(session)
            assign(session.build.models, own)

        self._break(f"step {step} does not train the same model: {finding.fault}", step, put_back)

    def _break(self, fault: str, step: int, put_back: Callable[[], None]) -> None:
        """Write down that the promise is broken. Raises Broken where the run must not go on so."""
        self.tally.broken_steps.append(step)
        text = f"{fault} ({self._since()})"
        assert self.progress is not None
        if self.on_broken == "ignore":
            if len(self.tally.broken_steps) == 1:
                self.progress.notice(f"{text}; the run goes on, as you asked")
            return
        put_back()
        facts = {"broken_step": step, "last_watched_step": self.tally.last_kept or 0, "broken": fault}
        raise Broken(text, Plan() if self.on_broken == "fallback" else None, facts)

    def _since(self) -> str:
        """What is known of the steps before a broken one."""
        earlier = (
            f"step {next(iter(self.suspected))} was suspect already; " if len(self.suspected) > 1 else ""
        )
        if self.tally.last_kept is None:
            return f"{earlier}no step before it was watched" if not earlier else earlier.rstrip("; ")
        return f"{earlier}the last watched step that trained the same model is {self.tally.last_kept}"


def _import_what_optimizers_need() -> None:
    """Torch imports its compiler, for half a second, with the first optimizer of a process. The training
    would do that without a twin, so it is no cost of watching.
    """
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)


def _same_streams(mine: dict[str, Any], theirs: dict[str, Any], names: tuple[str, ...]) -> bool:
    for name in names:
        ours, others = mine.get(name), theirs.get(name)
        if isinstance(ours, torch.Tensor) and isinstance(others, torch.Tensor):
            if not torch.equal(ours, others):
                return False
        elif repr(ours) != repr(others):
            return False
    return True


def _on(device: torch.device, part: Tensors) -> Tensors:
    return {name: tensor.to(device) for name, tensor in part.items()}
