"""A narrower model: timed before it costs anything, trained further, and judged as any other form."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from vivace.compressing.bench import Bench
from vivace.compressing.result import Tried
from vivace.errors import JobError, Refused, Unsteady, VivaceError
from vivace.events import Tell
from vivace.job import Job
from vivace.plan import Plan
from vivace.processes.launch import Child, Source
from vivace.serving.forms import EXTRA, PRUNED, Form, form_named
from vivace.watching.watched import train
from vivace.words import ratio, size, times

KEEP = 0.5
WORTH = 1.03  # times the best form of the whole model: what is less is not worth a training
CHECKPOINT_SECONDS = 60.0
ENDING_SECONDS = 600.0  # beyond the time for training: opening, the last evaluation and checkpoint
JOB, RUN, LOG = "pruned.py", "pruned", "pruned.log"
CHECKPOINTS = "checkpoints"  # of a run
TRAINER = "vivace.compressing.narrowing:Trainer"
TEXT = """\
\"\"\"The job with {keep} of each layer's channels, from the weights of a run; by vivace compress.\"\"\"

from vivace.serving.pruning import pruned

job = pruned({job!r}, run={run!r}, keep={keep})
"""


class Trainer:
    """Serves `vivace.processes.launch.Child`: trains the narrower model as `vivace train` does."""

    def __init__(self, job: Job, threads: int) -> None:
        torch.set_num_threads(threads)
        self.job = job

    def train(self, job: str, plan: dict[str, Any], out: str, seconds: float) -> dict[str, Any]:
        """Train it, or go on where an earlier search stopped, under the plan unless that declines it.

        Returns under ``declined`` why it did, else an empty text.
        """
        declined = ""
        try:
            self._run(job, Plan.from_dict(plan), out, seconds)
        except Refused as refused:
            declined = str(refused)
            self._run(job, Plan(), out, seconds)
        return {"declined": declined}

    def _run(self, job: str, plan: Plan, out: str, seconds: float) -> None:
        train(
            job,
            None
            if Path(out, CHECKPOINTS).exists()
            else plan,  # where it goes on its own: it may have fallen back
            out=out,
            resume=True,
            deadline_seconds=seconds,
            checkpoint_every_seconds=CHECKPOINT_SECONDS,
            on_broken="fallback",
        )


class Narrowing:
    """Prunes the model, and trains what is left where that pays.

    Args:
        bench: has begun.
        job: the reference of the job, which a child process can load from anywhere.
        folder: the output folder; the narrower job's file and its run stay there.
        seconds: for training.
        by_size: is the smallest model sought, and not the fastest?
    """

    def __init__(
        self, bench: Bench, job: str, folder: Path, seconds: float, tell: Tell, *, by_size: bool
    ) -> None:
        self.bench, self.job, self.folder, self.seconds, self._tell = bench, job, folder, seconds, tell
        self.by_size = by_size
        self.reference = f"{folder / JOB}:job"

    def tried(self, best: Tried) -> Tried:
        """The best form of the whole model, of a narrower one: how it went."""
        form = form_named(f"{PRUNED}{best.name}")
        if form.missing():
            return self._answer(form, "missing", f"{' and '.join(form.missing())} is not installed: {EXTRA}")
        self._tell("form_begin", {"form": form.name, "does": form.does, "left_seconds": self.seconds})
        try:
            one = self._judged(form, best)
        except Unsteady as error:
            busy = error.foreign_share
            one = self._answer(form, "unmeasured", str(error), foreign_share=busy)
        except (Refused, JobError) as error:
            one = self._answer(form, "refused", str(error))
        except VivaceError as error:  # whatever befell its training: what was tried before stands
            one = self._answer(form, "failed", str(error))
        self._tell("form_end", {"form": one, "left_seconds": 0.0})
        return one

    def _judged(self, form: Form, best: Tried) -> Tried:
        text = TEXT.format(job=self.job, run=self.bench.run, keep=KEEP)
        (self.folder / JOB).write_text(text, encoding="utf-8")
        source = Source(self.reference)
        self.bench.narrow = (source, "")
        self.bench.forget_narrow()
        speed, num_bytes = self.bench.glance(form)
        self.bench.forget_narrow()
        fastest = best.ratio.counts if best.ratio else 1.0
        worth = num_bytes < (best.bytes or 0) / WORTH if self.by_size else speed.low > WORTH * fastest
        if not worth:
            smaller = f"smaller ({size(num_bytes)} instead of {size(best.bytes)}) and "
            told = "" if num_bytes >= (best.bytes or 0) else smaller
            reason = f"{told}not faster: {ratio(speed)}, and {best.name} is {times(fastest)}"
            if self.by_size:
                reason = f"not smaller: {size(num_bytes)}, and {best.name} has {size(best.bytes)}"
            reason += "; it was not trained"
            return self._answer(form, "refused", reason, ratio=speed, bytes=num_bytes)
        self._tell("phase", {"name": f"training the narrower model: {ratio(speed)} before it was trained"})
        run = self.folder / RUN
        with Child(TRAINER, source, {"threads": self.bench.threads}, log=self.folder / LOG) as child:
            plan = self.bench.facts["trained"]["plan"]
            asked = {"job": self.reference, "plan": plan, "out": str(run), "seconds": self.seconds}
            declined = child.ask("train", self.seconds + ENDING_SECONDS, **asked)["declined"]
        self.bench.narrow = (source, str(run))
        one = self.bench.attempt(form, by_size=self.by_size)
        told = f"trained in strict fp32, as the run's plan does not act on it: {declined}" if declined else ""
        reason = "; ".join(filter(None, (one.reason, told)))
        return dataclasses.replace(one, reason=reason, job=self.reference, run=str(run))

    def _answer(self, form: Form, status: Any, reason: str, **found: Any) -> Tried:
        return Tried(form.name, form.does, form.runtime, form.numbers, status, reason, **found)
