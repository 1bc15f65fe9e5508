"""Trials that are trained as one, in one process: the child's side."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vivace.errors import Code, Diverged, Refused, VivaceError
from vivace.files import own_folder, replace_file
from vivace.inspection import inspect
from vivace.job import JobFunction
from vivace.processes.child import ask_parent
from vivace.processes.launch import own_error
from vivace.sweeping.stacking.choice import measured, most_rows, rows_at_once, step_seconds, too_large
from vivace.sweeping.stacking.feeding import Feed
from vivace.sweeping.stacking.keeping import LOG, Keeper
from vivace.sweeping.stacking.proof import Proof, Tightest, prove, worst
from vivace.sweeping.stacking.rows import Row, structure_of
from vivace.sweeping.stacking.stack import Stack
from vivace.sweeping.stacking.updates import baseline_of
from vivace.training.checkpoints import save_model

ENTRY = "vivace.sweeping.stacking.child:StackedTrials"
KEEPING_SHARE = 0.02  # of a stack's time, for checkpoints of its rows
FIRST_GUESS_SECONDS = 0.02  # of one row's checkpoint


@dataclasses.dataclass(frozen=True)
class Decision:
    """Are the runs trained as one? `reason` says why not; the rest is for the record."""

    fused: bool
    reason: str = ""
    rows: int = 0
    at_once: int = 0
    ratio: dict[str, float] | None = None
    sameness: str = ""
    baseline: str = ""
    update: str = ""
    alone_step_seconds: float | None = None


class StackedTrials:
    """Trains several trials as one in a child process; its methods are its parent's commands."""

    def __init__(self, job: JobFunction, threads: int) -> None:
        torch.set_num_threads(threads)
        self.job, self.machine = job, inspect()
        self.feed = Feed()
        self.stack: Stack | None = None
        self.structure: Any = None
        self.refused: dict[int, str] = {}
        self.failed: dict[int, dict[str, Any]] = {}
        self.proofs: list[Proof] = []  # the worst of all
        self.envelopes = Tightest()
        self.keepers: dict[int, Keeper] = {}
        self.kept_at, self.keeping_seconds = time.monotonic(), 0.0
        self.best = -math.inf  # metric of a trial that has ended: others' weights are written above it alone

    def train(
        self, trials: list[dict[str, Any]], known: dict[str, Any] | None = None, best: float = -math.inf
    ) -> dict[str, Any]:
        """Train trials as one until all have ended, if that is faster; the parent is asked after each epoch.

        A trial is ``{number, parameters, out, seed}``. `known` is what was decided of an earlier stack of
        this shape, which is not timed again; `best` the metric of the best trial so far. Returns
        ``{decision, refused, failed}``: trials that were not trained here by the reason, and those that
        could not be built by their error.
        """
        self.best = best
        rows = self._opened(trials)
        decision = self._decided(rows, known)
        if decision.fused:
            assert self.stack is not None
            self.kept_at, self.keeping_seconds = time.monotonic(), FIRST_GUESS_SECONDS * len(self.stack.rows)
            while self.stack.rows:
                decision = self._epoch(self.stack, decision)
                self._keep_all(self.stack)
        return {
            "decision": dataclasses.asdict(decision),
            "refused": {str(number): reason for number, reason in self.refused.items()},
            "failed": {str(number): error for number, error in self.failed.items()},
        }

    def _opened(self, trials: Sequence[dict[str, Any]]) -> list[Row]:
        """The rows of one structure among trials, which is that of the first row there ever was."""
        rows = []
        for trial in trials:
            number, parameters = trial["number"], trial["parameters"]
            try:
                row = Row(number, parameters, self.job(**parameters), self.machine, trial["seed"])
                structure = structure_of(row.job, row.model, row.optimizer)
                if self.structure not in (None, structure):
                    raise Refused("its model, loss or optimizer is built otherwise than those of the others")
                if self.stack is not None and not self.stack.takes(row):
                    raise Refused("its optimizer is set to another kind of update than those of the others")
                self.keepers[number] = Keeper(row, own_folder(Path(trial["out"])))
                row.require_as_begun()
                self.feed.enter(row)
                self.structure = structure
                rows.append(row)
            except Refused as refused:
                self.refused[number] = str(refused)
            except Exception as error:
                failed = own_error(error)
                if failed.code == Code.OUT_OF_MEMORY:  # it may fit where the others are not open beside it
                    self.refused[number] = str(failed)
                else:
                    self.failed[number] = failed.to_dict()
        return rows

    def _decided(self, rows: list[Row], known: dict[str, Any] | None) -> Decision:
        """May and should these rows be one? Those that must not be leave."""
        if len(rows) < 2:
            told = next(iter(self.refused.values()), "there is only one run of this shape")
            return Decision(False, told)
        fitting, why = most_rows(rows[0], self.feed.workers_of(rows[0]), self.machine.num_cores)
        for row in rows[fitting:]:
            self.refused[row.number] = why
        baseline = baseline_of(rows[0])
        try:
            self.stack = stack = Stack(rows[:fitting], self.feed)
            alone = step_seconds(stack, rows[0])
            if reason := too_large(alone):
                return Decision(False, reason, len(stack.rows), baseline=baseline, alone_step_seconds=alone)
            if known is not None and not (known["fused"] and 2 * len(stack.rows) >= known["rows"]):
                known = None
            stack.at_once = known["at_once"] if known else len(stack.rows)
            self._prove(stack, stack.rows)
            if not known and len(stack.rows) > 1 and rows_at_once(stack) < len(stack.rows):
                self._prove(stack, stack.rows)
            if len(stack.rows) < 2:
                told = next(iter(self.refused.values()), "one run is left")
                return Decision(False, told, baseline=baseline)
            if known:
                same = {"rows": len(stack.rows), "sameness": worst(self.proofs).sentence}
                return Decision(**known | same)
            ratio, alone = measured(stack)
        except Refused as refused:
            return Decision(False, str(refused), baseline=baseline)
        return Decision(
            fused=ratio.low > 1.0,
            reason="" if ratio.low > 1.0 else "it was not measured faster",
            rows=len(stack.rows),
            at_once=min(stack.at_once, len(stack.rows)),
            ratio=dataclasses.asdict(ratio),
            sameness=worst(self.proofs).sentence,
            baseline=baseline,
            update=type(stack.rule).__name__,
            alone_step_seconds=alone,
        )

    def _prove(self, stack: Stack, joining: Sequence[Row]) -> None:
        """Rows that are not the same model in the stack as alone leave it."""
        found = prove(stack, list(joining), self.envelopes)
        kept = [proof for proof in found.values() if isinstance(proof, Proof)]
        self.proofs = [worst(self.proofs + kept)] if kept else self.proofs
        wrong = {number: reason for number, reason in found.items() if isinstance(reason, Refused)}
        self.refused |= {number: str(reason) for number, reason in wrong.items()}
        self._leave(stack, wrong)
        for row in stack.rows:
            if row.number in found:
                row.note_modes()

    def _leave(self, stack: Stack, numbers: Any) -> None:
        slots = [slot for slot, row in enumerate(stack.rows) if row.number in numbers]
        for slot in slots:
            self._forget(stack.rows[slot])
        if slots:
            stack.remove(slots)

    def _forget(self, row: Row) -> None:
        """A row leaves, whose files are written."""
        self.feed.leave(row)
        del self.keepers[row.number]

    def _epoch(self, stack: Stack, decision: Decision) -> Decision:
        """Train an epoch of every row, tell the parent, and do as it says. Rows that no longer fit leave, and
        the decision is then that runs of this shape are better trained alone.
        """
        begin, losses = time.monotonic(), None
        every_step = stack.rows[0].job.scheduler_every == "step"
        for leaves in self.feed.epoch(stack.rows):
            losses = stack.step(leaves)
            for row in stack.rows:
                row.steps += 1
                if every_step:
                    row.step_scheduler()
        assert losses is not None
        told, left = list[dict[str, Any]](), dict[int, str]()
        for slot, loss in enumerate(losses.tolist()):
            try:
                told.append(self._ended_epoch(stack, slot, float(loss)))
            except Refused as refused:
                left[stack.rows[slot].number] = str(refused)
        self.refused |= left
        if left:
            decision = dataclasses.replace(decision, fused=False, reason=next(iter(left.values())))
        seconds = (time.monotonic() - begin) / len(losses)
        question = {
            "rows": told,
            "seconds": seconds,
            "fused": len(told),
            "decision": {**dataclasses.asdict(decision), "sameness": worst(self.proofs).sentence},
            "refused": {str(number): reason for number, reason in self.refused.items()},
            "failed": {str(number): error for number, error in self.failed.items()},
        }
        self.refused, self.failed = {}, {}
        answer = ask_parent(question)
        self.best = answer["best"]
        leaving = [one["number"] for one in told if one["ended"] or one["error"]] + answer["prune"]
        self._change(stack, [*left, *leaving], self._opened(answer["join"]))
        return decision

    def _change(self, stack: Stack, leaving: Sequence[int], joining: list[Row]) -> None:
        """Rows leave, and others take their places, or those that stood empty."""
        free = [slot for slot, row in enumerate(stack.rows) if row.number in leaving]
        others = dict(zip(free, joining, strict=False))
        for slot in others:
            self._forget(stack.rows[slot])
        if others:
            stack.replace(others)
        self._leave(stack, leaving)
        if further := joining[len(others) :]:
            stack.add(further)
        if joining:
            self._prove(stack, joining)

    def _ended_epoch(self, stack: Stack, slot: int, loss: float) -> dict[str, Any]:
        """What a row reached; the order of evaluation and schedule is that of `train`. Raises Refused where
        it is no longer the row that it was at the beginning.
        """
        row, error = stack.rows[slot], None
        row.loss = loss
        try:
            if (
                not bool(torch.isfinite(stack.weights[slot]).all())
                or loss != loss
                or abs(loss) == float("inf")
            ):
                raise Diverged(
                    f"the loss or a weight is not finite after epoch {row.epoch + 1} (loss {loss})"
                )
            row.metric = row.evaluation.metric()
            row.evaluation.let_go()  # of workers that live on, beside those of all other runs
            if row.job.scheduler_every == "epoch":
                row.step_scheduler()
        except VivaceError as raised:
            error = raised.to_dict()
        if error is None:
            row.require_as_begun()
        row.epoch += 1
        ended = row.epoch >= row.job.epochs
        found = {"number": row.number, "epoch": row.epoch, "metric": row.metric, "loss": loss}
        if error is None:
            self._write(row, found, ended)
        found["num_parameters"] = sum(p.numel() for p in row.model.parameters())
        return {**found, "of_epochs": row.job.epochs, "ended": ended, "error": error}

    def _keep_all(self, stack: Stack) -> None:
        """Checkpoints of all rows, as often as takes `KEEPING_SHARE` of the time."""
        begin = time.monotonic()
        if begin - self.kept_at < self.keeping_seconds / KEEPING_SHARE:
            return
        for slot, row in enumerate(stack.rows):
            if row.steps:
                self.keepers[row.number].save(stack, slot)
        self.kept_at = time.monotonic()
        self.keeping_seconds = self.kept_at - begin

    def _write(self, row: Row, found: dict[str, Any], ended: bool) -> None:
        """The files of a run alone, as far as a stack has them: the log, and at the end the weights."""
        out = self.keepers[row.number].out
        with (out / LOG).open("a" if row.epoch > 1 else "w", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
        if ended and found["metric"] > self.best:
            state = {name: tensor.clone() for name, tensor in row.model.state_dict().items()}
            replace_file(out / "model.pt", lambda file: save_model(state, file))
