"""The training loop: epochs, looks at the loss, and the agreement of ranks on when to save and to stop."""

from __future__ import annotations

import math
import time
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from vivace import words
from vivace.blame import blame
from vivace.errors import Diverged, FolderError, JobError, OutOfMemory, PromiseBroken, Refused, VivaceError
from vivace.events import EventKind, OnEvent
from vivace.inspection.energy import Meter
from vivace.job import Batch, Job
from vivace.plan import Plan
from vivace.session.opening import reopened, require_one_number, schedulers_of
from vivace.session.session import Session
from vivace.tensors.allocator import FullMemory
from vivace.tensors.denormals import Denormals, SlowNumbers
from vivace.tensors.loaders import known_length
from vivace.tensors.modules import trained_in
from vivace.training.checkpoints import Found
from vivace.training.evaluation import Evaluation, LeftOff
from vivace.training.finite import FAR, LOST
from vivace.training.keeping import DAMAGED_IN_VALIDATION, Keeping
from vivace.training.options import Options
from vivace.training.pace import Pace
from vivace.training.progress import ListenerFailed
from vivace.training.ranks import Ranks, Stranded
from vivace.training.stopping import SIGNALS, StopRequest
from vivace.training.stranded import leave
from vivace.training.survival import Smaller, naming_memory
from vivace.training.verdict import DATA_ENDED
from vivace.training.watch import Better, Broken, Watch

_LOOK_SECONDS, _MAX_BAD_LOOKS = 0.5, 3
DEADLINE = "deadline"
_REASONS = ("", DEADLINE, *SIGNALS)
MOST_REGROUPED, OFTEN_STEPS = 3, 100  # changes of the weights that are trained, under several ranks
_SPARE_SECONDS = 5.0  # before a deadline, beside two steps and two saves


class FirstAttempt(NamedTuple):
    """Of a loop that ended in numbers that are not finite: what is the process's, and nothing of the device.

    `stop` is still waited for; `seconds` are the run's; `meter` and `samples` are for the energy of both.
    """

    resumed_from_step: int | None
    notices: list[str]
    stop: StopRequest
    seconds: float
    meter: Meter
    samples: int


class Loop(Keeping):
    """One run in this process, from its newest checkpoint or its beginning to where something ends it."""

    def __init__(
        self,
        job: Job,
        session: Session,
        ranks: Ranks,
        path: Path,
        options: Options,
        on_event: OnEvent | None,
        watch: Watch,
    ) -> None:
        super().__init__(job, session, ranks, path, options, on_event, watch)
        damaged = path / DAMAGED_IN_VALIDATION if ranks.writes else None
        self.evaluation = Evaluation(job, session, options.seed, damaged=damaged, hangs=self.feed.hangs)
        self.feed.let_go = self.evaluation.let_go
        self.regrouped = deque[int](maxlen=MOST_REGROUPED + 1)  # at which steps other weights were trained
        self.born_at = psutil.Process().create_time()
        self.pace, self.memory, self.numbers = Pace(), FullMemory(self.device), SlowNumbers(self.device)
        if ranks.watch is not None:
            ranks.watch.told_to(path, self.progress.notice)
        self.stop = StopRequest(quiet_seconds=1.0 if ranks.world_size > 1 else 0.0)
        self.stopped_by = ""
        self.seen_samples = self.samples_before = 0
        self.stepping_seconds = self.slowest_look = 0.0
        self.look_at_step = self.first_step = self.position.step + 1
        self.looked_at, self.made_state = self.started_at, False

    def first_attempt(self) -> FirstAttempt:
        """What a second attempt in this process goes on with."""
        progress = self.progress
        return FirstAttempt(
            self.resumed_from_step, progress.notices, self.stop, self.seconds, progress.meter, self.samples
        )

    def repeat(self, why: str, first: FirstAttempt) -> None:
        """Take again what ended in numbers that are not finite, and look at each before it counts."""
        self.resumed_from_step, self.stop = first.resumed_from_step, first.stop
        self.seconds_before, self.samples_before = first.seconds, first.samples
        self.progress.notices[:], self.progress.meter = first.notices, first.meter
        where = f"step {self.position.step}" if self.position.step else "the beginning"
        self.progress.notice(f"{why}: back to {where}; from here on every number is checked")
        self.survival.take_care()

    def run(self) -> None:
        """Train until the epochs, `max_steps` or a signal end it, with a checkpoint at the end."""
        if not self._in_one_step():
            raise FolderError(
                f"the ranks see different checkpoints in '{self.path}': it must lie on a disk that all share"
            )
        steps, self.an_epoch = self._length()
        facts = {"step": self.position.step, "epochs": self.job.epochs, "steps_per_epoch": self.an_epoch}
        facts["num_parameters"] = sum(p.numel() for m in self.session.build.models for p in m.parameters())
        self.progress.tell(EventKind.BEGIN, **facts, steps=steps)
        self.watch.begin(self.progress, None if steps is None else steps - self.position.step)
        self.survival.note(self.position.step)
        with self.stop:
            try:
                with naming_memory():
                    self._take_up_the_watch()
                    self._train()
            except Stranded:
                raise leave(self.ranks, self.position.step, self.survival.inexact, self.save_alone) from None
            except (JobError, OutOfMemory, Refused) as error:
                if kept := self.keep_what_was_trained():
                    error.args = (f"{error}; {kept}",)
                raise
            except ListenerFailed as failed:
                if kept := self.keep_what_was_trained():
                    failed.error.add_note(kept)
                raise

    def _take_up_the_watch(self) -> None:
        """A resumed run must hold what the checkpoint does."""
        if not self.position.step:
            return
        try:
            self.watch.resumes(self.session, self.position, *self.held)
        except Broken as broken:
            if broken.plan is None:
                kept = f"step_{self.position.step} in '{self.checkpoints.folder}' stays as it is"
                raise PromiseBroken(
                    f"{broken}: training stopped; {kept}, and --resume --on-broken fallback goes on from it "
                    "under the reference"
                ) from None
            self._go_on_under(broken.plan, str(broken), anew=self.checkpoints.newest())

    def _train(self) -> None:
        with self.feed:
            while (
                self.position.epoch < self.job.epochs
                and not self._reached()
                and self._train_epoch()
                and self._end_epoch()
            ):
                pass
            self._require_health()
            if self.position != self.saved:
                self.save()
            measured = not self.stopped_by and self.job.metric is not None and self._evaluate()
        if measured:
            self._wake()
            found = {"metric": self.position.metric, **self._metric_facts()}
            self.progress.log(EventKind.METRIC, {"step": self.position.step, **found})

    def _in_one_step(self) -> bool:
        return len(set(self.ranks.gather(self.position.step))) == 1

    def _reached(self) -> bool:
        return self.options.max_steps is not None and self.position.step >= self.options.max_steps

    def _length(self) -> tuple[int | None, int | None]:
        """The steps of the run and of an epoch, where the length of the data is known."""
        limit, batches = self.options.max_steps, known_length(self.feed.own_loader)
        if batches is None:
            return limit, None
        an_epoch = -(-batches // self._batches_per_step())
        steps = self.job.epochs * an_epoch
        return min(steps, limit or steps), an_epoch

    def _train_epoch(self) -> bool:
        """Train on the rest of the epoch; False where something stopped it before its end."""
        while (ended := self._train_under_plan()) is None:
            pass
        return ended

    def _train_under_plan(self) -> bool | None:
        """The same until the session is opened anew; None where that ended it."""
        position = self.position
        batches = self.feed.batches(self.session, position)
        ended = True
        self.fetches()
        for batch in batches:
            if batch is None:  # every sample of it is damaged, and skipped
                position.batch += 1
                self.damage.require_few(self.samples)
                continue
            try:
                self.stride(batch)
            except (Smaller, Broken, Better) as other:
                batches.close()
                if other.plan is None:
                    raise self._stopped_before(other) from None
                lost = self.survival.inexact if isinstance(other, Smaller) else ""
                if not isinstance(other, Smaller):
                    self.survival.keep_streams()
                if isinstance(other, Broken):
                    self._go_on_under(other.plan, str(other))
                else:
                    self._go_over_to(other, lost)
                return None
            self._after_step()
            if self.stopped_by:
                return False
            self.fetches()
            if self._reached():
                # By the length: a batch that is not trained on may fail, or never come.
                ended = self.feed.counts and position.batch == self.an_epoch
                break
        if position.batch == 0 or position.step == 0:
            why = self.damage.sentence()
            raise JobError(f"the Job's data() gave no batch in epoch {position.epoch + 1}; {why}".strip("; "))
        self.ranks.at(f"{DATA_ENDED} in epoch {position.epoch + 1} after step {position.step}", position.step)
        self._take_stock()
        return ended and not self.stopped_by

    def _batches_per_step(self) -> int:
        return self.session.build.facts.batches_per_step

    def stride(self, batch: Batch) -> None:
        """The step of a batch that has come, and of its schedule; what they tell is handed on afterwards."""
        with self.progress.held():
            super().stride(batch)
            position = self.position
            if self.job.scheduler_every == "step":
                for _ in range(self.feed.num_batches_in(position.batch, self._batches_per_step())):
                    self._step_scheduler()
            self.survival.note(position.step)
            self._rest(ends=position.batch == self.an_epoch or self._reached())

    def take(self, batch: Batch) -> Any:
        """One step of the session, which leaves no trace where it fails; its loss."""
        build, watched = self.session.build, self.watch.seconds
        if build.exchanged and build.exchanged != trained_in(build.models):
            self.regrouped.append(self.position.step)
            if len(self.regrouped) > MOST_REGROUPED and self.position.step - self.regrouped[0] < OFTEN_STEPS:
                raise Refused(
                    f"weights were frozen or freed {MOST_REGROUPED + 1} times in {OFTEN_STEPS} steps, and "
                    "the ranks begin their exchange anew each time: do it less often, or in one process"
                )
            raise Broken("the ranks exchange gradients of other weights from here on", self.session.plan, {})
        self.unapplied.step_begins()
        try:
            loss = self.watch.step(self.session, self.position, batch, self._step)
            if build.own_step:
                require_one_number(loss)
        except Diverged as error:
            raise self._diverged(str(error), "in") from None
        except (Smaller, Broken, Better, Stranded):
            raise
        except (Exception, SystemExit) as error:
            self.between_steps = build.shards is None and not self.survival.undo()
            if isinstance(error, VivaceError):
                raise
            raise JobError(f"step {self.position.step + 1} of the training failed: {blame(error)}") from error
        self.looked_at += self.watch.seconds - watched  # no more than evaluation is it a step's
        return loss

    def _step(self, batch: Batch) -> Any:
        """One step; in the beginning, and where steps have become slower, its backward pass's numbers are
        looked at.
        """
        session = self.session
        if not self.numbers.wants_a_share or session.plan.compiles or session.build.shards is not None:
            return self.survival.step(batch)
        seen = Denormals()

        def counted(following: Callable[..., Any], *arguments: object) -> Any:
            with seen:
                return following(*arguments)

        with session.seams.observed(backward=counted):
            loss = self.survival.step(batch)
        if text := self.numbers.sentence(seen.share):
            self.progress.notice(text)
        return loss

    def _rest(self, *, ends: bool) -> None:
        watched = self.watch.seconds
        self.watch.rests(self.session, self.position, ends=ends)
        self.looked_at += self.watch.seconds - watched

    def _wake(self) -> None:
        """After an evaluation or an epoch: what the plan has changed is put back, and answered for."""
        try:
            with self.progress.held():
                self.watch.wakes(self.session, self.position)
        except Broken as broken:
            if broken.plan is None:
                raise self._stopped_before(broken) from None
            self.survival.keep_streams()
            self._go_on_under(broken.plan, str(broken))

    def _go_on_under(
        self, plan: Plan, why: str, inexact: str = "", anew: Found | None = None, refusal: str = ""
    ) -> None:
        """Take the step again under another plan; the run keeps that plan from here on.

        `inexact` says what of the failed step could not be put back; `anew` is a checkpoint to load again;
        `refusal` ends the run on all ranks.
        """
        self.watch.aside()
        self.session = self.evaluation.session = reopened(self.session, self.job, plan, self.ranks.regroup)
        self.feed.forget()  # workers that run already would not have what the plan brings
        told = self.ranks.gather((inexact, refusal))
        unknown = [lost for lost, _ in told if lost]
        if not self._in_one_step():  # the exchange broke before its last bytes had come
            unknown.append("one rank was a step behind")
        self.between_steps = not unknown
        if refusals := [f"rank {rank}: {own}" for rank, (_, own) in enumerate(told) if own]:
            raise OutOfMemory(refusals[0])
        if unknown:
            raise OutOfMemory(f"{why}; {unknown[0]}, so go on from the last checkpoint: --resume")
        if anew is not None:
            self.take_up(anew)
            self.survival.keep_streams()
        self.survival.resume(self.session)
        self.progress.notice(f"step {self.position.step + 1}: {why}")
        self.save()
        self._mark()

    def _go_over_to(self, other: Better | Smaller, inexact: str = "") -> None:
        """Train on under a plan that was found, or as before where it cannot act on the whole step."""
        try:
            refusal = other.refusal if isinstance(other, Smaller) else ""
            self._go_on_under(other.plan, str(other), inexact, refusal=refusal)
        except Refused as refused:
            more = set(other.plan.names) - set(self.session.plan.names)
            goes_on = isinstance(other, Better) or (more and more <= set(self.survival.savers))
            why = f"the run goes on as it is: {refused}"
            if not goes_on:
                why = f"{other}, which is refused: {refused}"
            self._go_on_under(self.session.plan, why, inexact)
            if not goes_on:
                raise OutOfMemory(why) from None

    def _stopped_before(self, broken: Broken) -> PromiseBroken:
        """Keep the state before a broken step, marked as such, and say so."""
        self.checkpoints.facts |= broken.facts
        self.save()
        return PromiseBroken(
            f"{broken}: training stopped; step_{self.position.step} in '{self.checkpoints.folder}' is the "
            "state before it, from which --resume --on-broken fallback goes on under the reference"
        )

    def _step_scheduler(self) -> None:
        for scheduler in schedulers_of(self.scheduler):
            on_plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            watched = (self._watched(),) if on_plateau else ()
            try:
                if self.samples:
                    scheduler.step(*watched)
                    continue
                with warnings.catch_warnings():  # not after each step: Python would forget what it has shown
                    # The update before a resumed run's first is an earlier process's; torch cannot know it.
                    warnings.simplefilter("ignore", UserWarning)
                    scheduler.step(*watched)
            except Exception as error:
                self.between_steps, step = False, self.position.step  # it may have counted already
                raise JobError(f"the Job's scheduler failed after step {step}: {blame(error)}") from error

    def _watched(self) -> float:
        """What a scheduler that waits for a plateau sees: the metric, or without one the loss."""
        if self.job.metric is None:
            if self.last_loss is None:  # an earlier process took the epoch's last step, and read its loss
                return math.nan if self.position.loss is None else self.position.loss
            return self.ranks.mean(float(self.last_loss))
        if self.position.metric is None:
            raise JobError("ReduceLROnPlateau waits for the metric of an epoch: use scheduler_every='epoch'")
        return self.position.metric

    def _after_step(self) -> None:
        made = any(optimizer.state for optimizer in self.session.optimizers)
        if self.position.step == self.first_step or made > self.made_state:
            self.require_storable()  # an optimizer makes its state in its first update
        self.made_state = made
        if self.glance():
            self.look_at_step = self.position.step
        step, every = self.position.step, self.options.checkpoint_every_steps
        asked = self.ranks.world_size == 1 and self.stop.signal_name
        due = every is not None and step % every == 0
        if step >= self.look_at_step or due or asked:
            self._take_stock(due)

    def _take_stock(self, due: bool = False) -> None:
        """Look at the loss, then agree on whether to stop and whether to save."""
        if self.looked_at_step == self.position.step:
            return
        self._look()
        self.damage.require_few(self.samples * self.ranks.world_size)
        late = time.monotonic() - self.saved_at >= self.options.checkpoint_every_seconds
        mine = _REASONS.index(self._reason_to_stop())
        stop, save = self.ranks.largest(mine, late and self.ranks.writes)
        self.stopped_by = _REASONS[int(stop)]
        if (save or due) and not self.stopped_by and self.is_healthy():
            self.save()
            self._ask_for_order()

    def _reason_to_stop(self) -> str:
        """The signal that asked for it, or the deadline; empty where the run goes on."""
        return self.stop.signal_name or (DEADLINE if self._is_nearly_over() else "")

    def _is_nearly_over(self) -> bool:
        """Would the deadline pass before another look and a checkpoint?"""
        limit = self.options.deadline_seconds
        if limit is None:
            return False
        lived = time.time() - self.born_at
        spare = min(_SPARE_SECONDS, 0.1 * limit)
        return lived + 2 * (self.slowest_save + self.slowest_look) + spare >= limit

    def _ask_for_order(self) -> None:
        if self.ranks.writes and (text := self.feed.unordered()):
            self.progress.notice(text)
        self._mark()

    def _look(self) -> None:
        """Wait for the device and read the loss; log it; decide on which step all ranks look again."""
        position = self.position
        self.feed.require_one_stream(self.session, position)
        steps = position.step - self.looked_at_step
        seconds = max(time.monotonic() - self.looked_at, 1e-9)
        loss, weights = float(self.last_loss), self.growth.of_weights(self.session)
        rows = self.ranks.numbers(loss, seconds, weights, *self.survival.own.take())
        loss = sum(row[0] for row in rows) / len(rows)
        slow = self.pace.add([row[3:] for row in rows], steps, seconds) if len(rows) > 1 else ""
        samples = (self.samples - self.seen_samples) * self.ranks.world_size
        self.numbers.note(seconds / max(samples, 1))
        for text in filter(None, (slow, self.memory.sentence(position.step))):
            self.progress.notice(text)
        self.stepping_seconds += seconds
        position.loss = loss if math.isfinite(loss) else None
        record: dict[str, Any] = {"step": position.step, "epoch": position.epoch + 1, "loss": position.loss}
        record["samples_per_second"] = round(samples / seconds, 3)
        if self.session.build.facts.skipped_steps is not None:
            record["skipped_steps"] = int(self.session.build.facts.skipped_steps)
        self.progress.log(EventKind.STEP, record)
        slowest = max(row[1] for row in rows)
        self.slowest_look = max(self.slowest_look, slowest)
        self.look_at_step = position.step + max(1, min(2 * steps, int(_LOOK_SECONDS / slowest * steps)))
        self._mark()
        self._judge(loss, max(row[2] for row in rows))

    def _judge(self, loss: float, weights: float) -> None:
        """Stop where the loss or the weights stay out of bounds; while they do, every step is looked at."""
        grown, words = self.growth.judge(loss, weights)
        bad = not math.isfinite(loss) or grown > LOST
        self.bad_looks = self.bad_looks + 1 if bad else 0
        if bad:
            self.look_at_step = self.position.step + 1
        if self.bad_looks >= _MAX_BAD_LOOKS:
            may_pass = not math.isfinite(loss)
            raise self._diverged(f"the loss is {loss:.4g}" if may_pass else words, may_pass=may_pass)
        if grown > FAR and not self.growth.told:
            self.growth.told = True
            self.progress.notice(f"at step {self.position.step} {words}: it diverges")

    def _mark(self) -> None:
        """Speed is counted from here: neither evaluation nor saving belongs to a step."""
        self.looked_at, self.looked_at_step = time.monotonic(), self.position.step
        self.seen_samples = self.samples

    def _require_health(self) -> None:
        if not self.is_healthy():
            raise self._diverged("the loss or a weight is not finite", may_pass=True)

    def _diverged(self, what: str, where: str = "at", *, may_pass: bool = False) -> Diverged:
        epoch = min(self.position.epoch + 1, self.job.epochs)
        kept = f"step {self.saved.step} is the last good checkpoint" if self.saved.step else "no checkpoint"
        step = self.position.step + (where == "in")
        found = f"{what} {where} step {step} (epoch {epoch})"
        return Diverged(
            f"{found}: training stopped; {kept}; try a smaller learning rate, clipping in on_gradients, or a "
            "plan without 16-bit numbers",
            may_pass=may_pass,
            what=found,
        )

    def _end_epoch(self) -> bool:
        """Evaluate, and let the epoch count; False where the run is to stop before that."""
        position = self.position
        record: dict[str, Any] = {"step": position.step, "epoch": position.epoch + 1, "loss": position.loss}
        if self.job.metric is not None:
            if not self._evaluate():
                return False
            record |= {"metric": position.metric, **self._metric_facts()}
        self._wake()
        if self.job.scheduler_every == "epoch":
            self._step_scheduler()
            self._rest(ends=True)
        if missing := self.feed.num_missing(position.batch, self._batches_per_step()):
            position.missing += missing if self.feed.counts else 0
            self.progress.notice(
                f"epoch {position.epoch + 1} ended {words.count(missing, 'step')} early: the data's length "
                f"promises {position.batch + missing}, and {position.batch} came"
            )
        position.epoch += 1
        position.batch = 0
        self.progress.log(EventKind.EPOCH, record)
        self._mark()
        return True

    def _metric_facts(self) -> dict[str, Any]:
        seconds = round(self.seconds, 3)
        return {"metric_name": self.job.metric_name, "metric_data": self.job.metric_data, "seconds": seconds}

    def _evaluate(self) -> bool:
        """Put the metric of the present weights on the position; rank 0 computes it, all ranks know it.

        False where the run was asked to stop meanwhile: it goes on with this evaluation.
        """
        position = self.position
        if position.metric_step == position.step:
            return True
        value: float | str | None = None
        self._rest(ends=True)
        self.ranks.at(f"its metric after step {position.step}", position.step)
        with self.ranks.together(), self.session.whole():
            if self.ranks.writes:
                try:
                    value = self.evaluation.metric(lambda: self._reason_to_stop() != "")
                    self._tell_what_validation_lacks()
                except LeftOff:
                    value = self._reason_to_stop()
        value = self.ranks.from_first(value)
        if isinstance(value, str):
            self.stopped_by = value
            return False
        position.metric, position.metric_step = value, position.step
        return True

    def _tell_what_validation_lacks(self) -> None:
        if befell := self.evaluation.lost_worker:
            self.evaluation.lost_worker = ""
            self.progress.notice(
                f"a worker of the metric's loader {befell}: after step {self.position.step} it began anew"
            )
        for technique, reason in self.evaluation.left_alone().items():
            text = f"{technique} leaves the validation data as they are: {reason}"
            if text not in self.progress.notices:
                self.progress.notice(text)
