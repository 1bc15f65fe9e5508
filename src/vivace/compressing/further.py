"""Models that are trained further to be served: narrower, or with int8's rounding."""

from __future__ import annotations

import abc
import dataclasses
import time
from pathlib import Path
from typing import Any, ClassVar

import psutil
import torch

from vivace.compressing.bench import Bench, outcome_of
from vivace.compressing.result import Tried, choose
from vivace.errors import JobError, Refused, Unsteady, VivaceError
from vivace.events import Tell
from vivace.job import Job
from vivace.plan import Plan
from vivace.processes.launch import Child, Source
from vivace.serving.forms import PRUNED, RETRAINED, Form, form_named
from vivace.serving.trained import load_trained
from vivace.watching.watched import train
from vivace.words import ratio, size, times

KEEP = 0.5
WORTH = 1.03  # times the best form of the whole model: what is less is not worth a training
CHECKPOINT_SECONDS = 60.0
ENDING_SECONDS = 600.0  # beyond the time for training: opening, the last evaluation and checkpoint
CHECKPOINTS = "checkpoints"  # of a run
TRAINER = "vivace.compressing.further:Trainer"


class Trainer:
    """Serves `vivace.processes.launch.Child`: trains a model further as `vivace train` does."""

    def __init__(self, job: Job, threads: int) -> None:
        torch.set_num_threads(threads)
        self.job = job

    def train(self, job: str, plan: dict[str, Any], out: str, seconds: float, seed: int) -> dict[str, Any]:
        """Train it, or go on where an earlier search stopped, under the plan unless that declines it.

        `seed` is that of the model's own run: data that are split at random are split as they were there.

        Returns under ``declined`` why it did, else an empty text; under ``weights`` the sha256 of those
        that came of it.
        """
        declined = ""
        try:
            self._run(job, Plan.from_dict(plan), out, seconds, seed)
        except Refused as refused:
            declined = str(refused)
            self._run(job, Plan(), out, seconds, seed)
        return {"declined": declined, "weights": load_trained(self.job, Path(out))[1].sha256}

    def _run(self, job: str, plan: Plan, out: str, seconds: float, seed: int) -> None:
        goes_on = Path(out, CHECKPOINTS).exists()  # under its own plan: it may have fallen back
        lived = time.time() - psutil.Process().create_time()  # from which a deadline counts
        train(
            job,
            None if goes_on else plan,
            out=out,
            seed=seed,
            resume=True,
            deadline_seconds=lived + seconds,
            checkpoint_every_seconds=CHECKPOINT_SECONDS,
            on_broken="fallback",
        )


class Further(abc.ABC):
    """One way to train the model further, and what comes of it.

    Args:
        bench: has begun.
        job: the reference of the job, which a child process can load from anywhere.
        folder: the output folder; the file of the job and its run stay there.
        seconds: for training.
        by_size: is the smallest model sought, and not the fastest?
    """

    prefix: ClassVar[str]  # of the forms
    name: ClassVar[str]  # of the run's folder, and of the job's file
    text: ClassVar[str]  # of the job's file

    def __init__(
        self, bench: Bench, job: str, folder: Path, seconds: float, tell: Tell, *, by_size: bool
    ) -> None:
        self.bench, self.job, self.folder, self.seconds, self._tell = bench, job, folder, seconds, tell
        self.by_size = by_size
        self.reference = f"{folder / self.name}.py:job"

    @classmethod
    def files(cls) -> tuple[str, str]:
        """What it leaves beside the run's folder: the file of the job and a log."""
        return f"{cls.name}.py", f"{cls.name}.log"

    @abc.abstractmethod
    def meant(self, tried: list[Tried], best: Tried) -> Tried | None:
        """The form whose model is to be trained further; None where none is worth it."""

    @abc.abstractmethod
    def _judged(self, form: Form, meant: Tried, best: Tried) -> Tried:
        """The answer, trained or not. Raises Unsteady, Refused, JobError, VivaceError."""

    def tried(self, tried: list[Tried], best: Tried) -> Tried | None:
        """How it went; None where there is nothing to train."""
        meant = self.meant(tried, best)
        if meant is None:
            return None
        form = form_named(f"{self.prefix}{meant.name}")
        if form.missing():
            return self.bench.attempt(form, by_size=self.by_size)
        self._tell("form_begin", {"form": form.name, "does": form.does, "left_seconds": self.seconds})
        try:
            one = self._judged(form, meant, best)
        except Unsteady as error:
            busy = error.foreign_share
            one = outcome_of(form, "unmeasured", str(error), foreign_share=busy)
        except (Refused, JobError) as error:
            one = outcome_of(form, "refused", str(error))
        except VivaceError as error:  # whatever befell its training: what was tried before stands
            one = outcome_of(form, "failed", str(error))
        self._tell("form_end", {"form": one, "left_seconds": 0.0})
        return one

    def _source(self) -> Source:
        """The job that is trained further, from its file."""
        (self.folder / f"{self.name}.py").write_text(
            self.text.format(job=self.job, run=self.bench.run), encoding="utf-8"
        )
        return Source(self.reference)

    def _trained(self, form: Form, source: Source, phase: str) -> Tried:
        """Train it, and judge the form with the weights that came of it."""
        self._tell("phase", {"name": phase})
        run, log = self.folder / self.name, self.folder / f"{self.name}.log"
        with Child(TRAINER, source, {"threads": self.bench.threads}, log=log) as child:
            trained = self.bench.facts["trained"]
            asked = {"job": self.reference, "plan": trained["plan"], "seed": trained["seed"]}
            asked |= {"out": str(run), "seconds": self.seconds}
            done = child.ask("train", self.seconds + ENDING_SECONDS, **asked)
        self.bench.forget_further(self.prefix)
        self.bench.further[self.prefix] = (source, str(run))
        one = self.bench.attempt(form, by_size=self.by_size)
        told = f"trained in strict fp32, as the run's plan does not act on it: {done['declined']}"
        reason = "; ".join(filter(None, (one.reason, told if done["declined"] else "")))
        weights = done["weights"]
        return dataclasses.replace(one, reason=reason, job=self.reference, run=str(run), weights=weights)


class Retraining(Further):
    """Quantization-aware training, where int8 would be the best form and loses more than the margin."""

    prefix, name = RETRAINED, "retrained"
    text = """\
\"\"\"The job with int8's rounding in its products, from the weights of a run; by vivace compress.\"\"\"

from vivace.serving.quantizing import quantization_aware

job = quantization_aware({job!r}, run={run!r})
"""

    def meant(self, tried: list[Tried], best: Tried) -> Tried | None:
        """The best form in int8 of those that lost too much of the metric, if it is better than the best."""
        refused = [one for one in tried if one.numbers == "int8" and one.status == "refused" and one.change]
        lost = [one for one in refused if one.change and not one.change["kept"]]
        if self.by_size:
            small = [one for one in lost if (one.bytes or 0) < (best.bytes or 0) / WORTH]
            return min(small, key=lambda one: one.bytes or 0, default=None)
        fast = [one for one in lost if _speed(one) > WORTH * _speed(best)]
        return max(fast, key=_speed, default=None)

    def _judged(self, form: Form, meant: Tried, best: Tried) -> Tried:
        phase = f"training with int8's rounding: {meant.name} is {times(_speed(meant))}, and {meant.reason}"
        return self._trained(form, self._source(), phase)


class Narrowing(Further):
    """Prunes the model, and trains what is left where that pays."""

    prefix, name = PRUNED, "pruned"
    text = f"""\
\"\"\"The job with {KEEP} of each layer's channels, from the weights of a run; by vivace compress.\"\"\"

from vivace.serving.pruning import pruned

job = pruned({{job!r}}, run={{run!r}}, keep={KEEP})
"""

    def meant(self, tried: list[Tried], best: Tried) -> Tried | None:
        """The best form of the run's own model."""
        own = [one for one in tried if not form_named(one.name).further]
        return choose(own, by_size=self.by_size)

    def _judged(self, form: Form, meant: Tried, best: Tried) -> Tried:
        source = self._source()
        self.bench.further[self.prefix] = (source, "")
        self.bench.forget_further(self.prefix)
        speed, num_bytes = self.bench.glance(form)
        worth = num_bytes < (best.bytes or 0) / WORTH if self.by_size else speed.low > WORTH * _speed(best)
        if not worth:
            smaller = f"smaller ({size(num_bytes)} instead of {size(best.bytes)}) and "
            told = "" if num_bytes >= (best.bytes or 0) else smaller
            reason = f"{told}not faster: {ratio(speed)}, and {best.name} is {times(_speed(best))}"
            if self.by_size:
                reason = f"not smaller: {size(num_bytes)}, and {best.name} has {size(best.bytes)}"
            reason += "; it was not trained"
            return outcome_of(form, "refused", reason, ratio=speed, bytes=num_bytes)
        phase = f"training the narrower model: {ratio(speed)} before it was trained"
        return self._trained(form, source, phase)


WAYS: tuple[type[Further], ...] = (Retraining, Narrowing)


def _speed(one: Tried) -> float:
    return one.ratio.counts if one.ratio else 1.0
