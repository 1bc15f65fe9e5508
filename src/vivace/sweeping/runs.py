"""The parent's side of trials: who runs next, in which process, and what becomes of its end."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from optuna.trial import TrialState

from vivace.errors import AnswerIsNo, FolderError, VivaceError
from vivace.events import Tell
from vivace.plan import Plan
from vivace.processes.launch import Child, Source
from vivace.sweeping import trial as child_side
from vivace.sweeping.folder import LOG, SweepFolder, lighten
from vivace.sweeping.fused import Fused, Shape
from vivace.sweeping.packing import SILENCE_SECONDS, Packing
from vivace.sweeping.record import record_of
from vivace.sweeping.space import Parameters, size_of, told
from vivace.sweeping.stacking import child as stack_side
from vivace.sweeping.study import Asked, Study
from vivace.words import number

if TYPE_CHECKING:
    from vivace.sweeping.cluster import Cluster

MOST_FAILURES = 5  # at the beginning, without one result

MOST_ROWS = 32  # of a stack
MOST_FOLLOWING = 8  # times as many take their places before another shape may have its turn
GENERATIONS = 4  # of stacks, at least, in a sweep
STACKS_A_SHAPE = 2  # as many at least, if their shapes were drawn evenly

Work = Callable[[], None]
Repeat = tuple[Asked, int]  # a configuration, and another seed


class Runs:
    """Runs trials of one study side by side, each in its own process, or several of one shape as one.

    Every trial has the study's seed: what differs between them is their parameters alone.

    Args:
        study, folder, source: of the sweep.
        plan: under which every trial trains.
        packing: how many run at a time, and with how many threads each.
        tell: hears ``swept`` of every trial.
        shaping: the parameters that decide who may share a stack: runs that agree in them may be fused.
        fusing: may runs be trained as one?
        cluster: where trials run; left out, on this machine.
    """

    def __init__(
        self,
        study: Study,
        folder: SweepFolder,
        source: Source,
        plan: Plan,
        *,
        packing: Packing,
        tell: Tell,
        shaping: Sequence[str] = (),
        fusing: bool = True,
        cluster: Cluster | None = None,
    ) -> None:
        self.study, self.folder, self.source, self.plan = study, folder, source, plan
        self.seed, self.packing, self.tell = study.setting.seed, packing, tell
        self.shaping, self.fusing, self.cluster = shaping, fusing, cluster
        if cluster is not None:
            cluster.begin(child_side.ENTRY, source)
        self.best: tuple[float, int] | None = None
        self.decisions: list[dict[str, Any]] = []
        self.failed_under: dict[int, list[str]] = {}  # reasons, by trial: under seeds other than the search's
        self.wanted = self.at_once = 0  # trials in all; runs at a time, once there is one
        self._waiting: list[Asked] = []
        self._alone: set[int] = set()  # trials that no stack takes
        self._apart: set[Shape] = set()  # shapes whose runs are not faster, or not the same, as one
        self._lock = threading.RLock()
        self._children: set[int] = set()
        self._stopping = False
        self._failure = ""  # the last one: with which parameters, and why

    def search(self, wanted: int) -> None:
        """Run trials until `wanted` count, those of earlier sessions too, or none is left to try.

        Raises AnswerIsNo where the first ones all fail, FolderError where the folder cannot be written.
        """
        self.wanted = wanted
        self._waiting += self.study.left_over()
        for trial in self.study.counted():
            if trial.state != TrialState.COMPLETE:  # a pruned one has its last metric as a value
                continue
            if trial.values and (self.best is None or trial.values[0] > self.best[0]):
                self.best = trial.values[0], trial.number

        def following() -> Work | None:
            with self._lock:
                asked = self._waiting.pop(0) if self._waiting else self._ask()
                if asked is None:
                    return None
                shape = self._shape_of(asked)
                if self.fusing and shape not in self._apart and asked.number not in self._alone:
                    rows, further = self._places()
                    together = [asked, *self.alike(shape, rows - 1)]
                    if len(together) > 1:
                        return partial(self._fuse, together, shape, further)
                return partial(self._try, asked)

        self._side_by_side(following)

    def repeat(self, configurations: list[Repeat]) -> dict[tuple[int, int], float]:
        """Train configurations under other seeds; metrics by trial and seed, of those that succeed. One that
        has ended in an earlier session is not trained again.
        """
        known = self.study.repeated()
        waiting = [(asked, seed) for asked, seed in configurations if (asked.number, seed) not in known]
        most = max(2, min(MOST_ROWS, -(-len(waiting) // self.packing.workers)))

        def following() -> Work | None:
            if not waiting:
                return None
            first, *others = waiting
            shape, together = self._shape_of(first[0]), [first]
            if self.fusing and shape not in self._apart and first[0].number not in self._alone:
                fit = (one for one in others if self._shape_of(one[0]) == shape)
                together += islice((one for one in fit if one[0].number not in self._alone), most - 1)
            waiting[:] = [one for one in waiting if one not in together]
            if len(together) > 1:
                return partial(self._repeat_as_one, together, shape)
            return partial(self._repeat_alone, *first)

        self._side_by_side(following)
        found = self.study.repeated()
        wanted = [(asked.number, seed) for asked, seed in configurations]
        return {pair: found[pair] for pair in wanted if pair in found}

    def _repeat_as_one(self, together: list[Repeat], shape: Shape) -> None:
        """Train these as one; those that cannot be part of that are run alone afterwards."""
        left, known = dict(enumerate(together)), self._known(shape)

        def heard(question: dict[str, Any]) -> dict[str, Any]:
            for row in question["rows"]:
                if row["error"] is not None:
                    self._repeated(*left.pop(row["number"]), VivaceError.from_dict(row["error"]))
                elif row["ended"]:
                    self._repeated(*left.pop(row["number"]), row["metric"])
            return {"prune": [], "join": [], "best": math.inf}  # whose weights nobody asks for

        rows = [
            {
                "number": n,
                "parameters": one.parameters,
                "out": str(self.folder.seed(one.number, seed)),
                "seed": seed,
            }
            for n, (one, seed) in left.items()
        ]
        try:
            with self._child(stack_side.ENTRY) as child:
                told = {"trials": rows, "known": known, "best": math.inf}
                answer = child.converse("train", SILENCE_SECONDS, heard, **told)
            if known is None:
                self.decided(answer["decision"], shape)
        except FolderError:
            raise
        except VivaceError:
            if self._stopping:
                return
        for asked, seed in list(left.values()):
            self._repeat_alone(asked, seed)

    def _repeat_alone(self, asked: Asked, seed: int) -> None:
        try:
            out = self.folder.alone(self.folder.seed(asked.number, seed))
            answer = self._train(asked, str(out), seed, lambda _: {"prune": False})
        except FolderError:
            raise
        except VivaceError as error:
            if not self._stopping:
                self._repeated(asked, seed, error)
            return
        self._repeated(asked, seed, answer["metric"])

    def _repeated(self, asked: Asked, seed: int, how: float | VivaceError) -> None:
        """A configuration under another seed has reached a metric, or failed."""
        out = self.folder.seed(asked.number, seed)
        if isinstance(how, VivaceError):
            shutil.rmtree(out, ignore_errors=True)
            with self._lock:
                self.failed_under.setdefault(asked.number, []).append(f"under seed {seed}: {how}")
            state, text = "failed", f" failed: {how}"
        else:
            self.study.repeat(asked.number, seed, how)
            lighten(out, model=False)
            state, text = "complete", f": {number(how)}"
        text = f"trial {asked.number} under seed {seed}{text}"
        self.tell("swept", {"number": asked.number, "state": state, "text": text, "seed": seed})

    def _ask(self, like: Parameters | None = None) -> Asked | None:
        """A new trial, while fewer are counted or open than are wanted."""
        if self.study.num_begun >= self.wanted:
            return None
        return self.study.ask(like)

    def alike(self, shape: Shape, most: int) -> list[Asked]:
        """Other trials of this shape: those that wait, then new ones."""
        with self._lock:
            fit = (a for a in self._waiting if self._shape_of(a) == shape and a.number not in self._alone)
            found = list(islice(fit, most))
            self._waiting = [asked for asked in self._waiting if asked not in found]
        while len(found) < most:
            time.sleep(0)  # whoever waits to be heard comes first
            with self._lock:
                if (asked := self._ask(dict(shape))) is None:
                    break
            found.append(asked)
        return found

    def goes_on(self, shape: Shape) -> bool:
        """Is the trial that comes next, whatever its shape, one of this shape?"""
        with self._lock:
            first = next((one for one in self._waiting if one.number not in self._alone), None)
            if first is None and (first := self._ask()) is not None:
                self._waiting.append(first)
            return first is not None and self._shape_of(first) == shape

    @property
    def best_metric(self) -> float:
        """Of the trials that have ended; below all before the first."""
        return -math.inf if self.best is None else self.best[0]

    def run_alone(self, asked: Sequence[Asked]) -> None:
        """These trials are to be run in processes of their own."""
        with self._lock:
            self._alone |= {one.number for one in asked}
            self.wait(asked)

    def wait(self, asked: Sequence[Asked]) -> None:
        """These trials are to be run when their turn comes."""
        with self._lock:
            self._waiting += asked

    def decided(self, decision: dict[str, Any], shape: Shape) -> None:
        """What was found of runs of this shape; where they are not fused, they are not tried again."""
        with self._lock:
            if not decision["fused"]:
                self._apart.add(shape)
            known = [one for one in self.decisions if one["shape"] == dict(shape)]
            if not known:
                self.decisions.append({"shape": dict(shape)})
            (known or self.decisions[-1:])[0].update(decision)

    def _known(self, shape: Shape) -> dict[str, Any] | None:
        """What was decided of an earlier stack of this shape."""
        with self._lock:
            found = (one for one in self.decisions if one["shape"] == dict(shape))
            return next(({k: v for k, v in one.items() if k != "shape"} for one in found), None)

    def _shape_of(self, asked: Asked) -> Shape:
        return tuple((name, asked.parameters[name]) for name in self.shaping)

    def _places(self) -> tuple[int, int | None]:
        """How many runs are stacked, and how many more may follow in their places; None: any number.

        Few enough that the search learns from some before it asks for more, and that it comes to each shape.
        """
        if not self.shaping:
            return max(2, min(MOST_ROWS, self.wanted // GENERATIONS)), None
        shapes = size_of({name: self.study.space[name] for name in self.shaping})
        share = max(2, int(self.wanted // max(GENERATIONS, STACKS_A_SHAPE * shapes)))
        rows = max(2, min(MOST_ROWS, -(-share // 2)))
        return rows, min(MOST_FOLLOWING * rows, share - rows)

    def _side_by_side(self, following: Callable[[], Work | None]) -> None:
        """Do one piece of work after another, `workers` at once; Ctrl-C and errors end all of them."""
        with ThreadPoolExecutor(self.packing.workers, "sweep") as pool:
            running: set[Future[None]] = set()
            try:
                while True:
                    while len(running) < self.packing.workers and (work := following()) is not None:
                        running.add(pool.submit(work))
                        self.at_once = self.packing.workers
                    if not running:
                        return
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    for one in done:
                        one.result()
                    self._require_hope()
            except FolderError as error:
                self._stop()
                raise FolderError(f"{error}; the sweep stops here, and goes on with --resume") from None
            except BaseException:
                self._stop()
                raise

    def _require_hope(self) -> None:
        """Raises AnswerIsNo where the first trials failed, all that have ended did, and of those that are
        being trained none has come further.
        """
        if not self._failure or self.best is not None:
            return
        failed, others = self.study.counted(), self.study.open()
        if len(failed) < MOST_FAILURES or any(t.state != TrialState.FAIL for t in failed):
            return
        farthest = max(len(trial.intermediate_values) for trial in failed)
        last_of_first = failed[MOST_FAILURES - 1].number
        if others and self.study.costs:  # of which nothing is noted before they end
            return
        if any(t.number < last_of_first or len(t.intermediate_values) > farthest for t in others):
            return
        raise AnswerIsNo(f"the first {len(failed)} trials failed; the last with {self._failure}")

    def _stop(self) -> None:
        """End all child processes; their trials stay open in the journal."""
        with self._lock:
            self._stopping = True
            if self.cluster is not None:
                self.cluster.stop()
            for pid in self._children:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)

    def _try(self, asked: Asked) -> None:
        """Run one trial and tell the study how it ended."""
        out, begin = self.folder.alone(self.folder.trial(asked.number)), time.monotonic()
        curve = self.study.curve(asked.number)

        def heard(found: dict[str, Any]) -> dict[str, Any]:
            curve[found["epoch"]] = found["metric"]
            stop = self.study.report(asked.number, found["epoch"], found["metric"])
            return {"prune": stop and not found["ended"]}  # nothing is left to prune at the end

        try:
            answer = self._train(asked, str(out), self.seed, heard)
            if "seconds" in self.study.costs and answer.get("step_seconds") is None:
                shutil.rmtree(out)  # it had ended before a kill, and how long its steps took went with it
                answer = self._train(asked, str(out), self.seed, heard)
        except FolderError:
            raise
        except VivaceError as error:
            if not self._stopping:
                self.failed(asked, error, curve, time.monotonic() - begin)
            return
        self.ended(asked, answer, curve, time.monotonic() - begin)

    def _fuse(self, together: list[Asked], shape: Shape, further: int | None) -> None:
        """Train trials of one shape as one; what cannot be part of that is run alone afterwards."""
        fused = Fused(self, together, shape, further)
        try:
            with self._child(stack_side.ENTRY) as child:
                answer = child.converse(
                    "train",
                    SILENCE_SECONDS,
                    fused.heard,
                    fused.draw,
                    trials=[fused.told(asked) for asked in together],
                    known=self._known(shape),
                    best=self.best_metric,
                )
            fused.end(answer)
        except FolderError:
            raise
        except VivaceError as error:
            if not self._stopping:
                fused.broken(error)

    def _train(
        self, asked: Asked, out: str, seed: int, heard: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> dict[str, Any]:
        run = {"parameters": asked.parameters, "plan": self.plan.to_dict(), "out": out, "seed": seed}
        if self.cluster is not None:
            return self.cluster.train(heard, **run)
        with self._child(child_side.ENTRY) as child:
            answer: dict[str, Any] = child.converse("train", SILENCE_SECONDS, heard, **run)
            return answer

    @contextlib.contextmanager
    def _child(self, entry: str) -> Iterator[Child]:
        with self._lock:
            if self._stopping:
                raise VivaceError("the sweep is being stopped")
            child = Child(entry, self.source, {"threads": self.packing.threads}, log=self.folder.path / LOG)
            self._children.add(child.pid)
        try:
            with child:
                yield child
        finally:
            with self._lock:
                self._children.discard(child.pid)

    def failed(self, asked: Asked, error: VivaceError, curve: dict[int, float], seconds: float) -> None:
        """A trial has no result."""
        facts = {"reason": str(error), "code": str(error.code), "kind": error.kind}
        self.study.fail(asked.number, curve=curve, seconds=seconds, **facts)
        lighten(self.folder.trial(asked.number), model=False)
        self._told(asked.number)
        self._failure = f"{told(asked.parameters)}: {error}"

    def ended(self, asked: Asked, answer: dict[str, Any], curve: dict[int, float], seconds: float) -> None:
        """A trial came to its end, or was pruned."""
        which, metric = asked.number, answer["metric"]
        facts = {"metric": metric, "curve": curve, "seconds": seconds}
        costs = {"seconds": answer.get("step_seconds"), "parameters": answer.get("num_parameters")}
        facts |= {"costs": costs, "plan_left": answer.get("plan_left", "")}
        facts |= {"peak_bytes": answer.get("peak_bytes"), "epochs": answer.get("epoch")}
        facts |= {"of_epochs": answer.get("of_epochs")}
        facts |= answer.get("facts", {})
        if answer["pruned"]:
            self.study.prune(which, **facts)
            lighten(self.folder.trial(which), model=False)
        elif any(costs[name] is None for name in self.study.costs):
            self.study.fail(which, **facts, reason="none of its steps was timed", kind="VivaceError")
        else:
            weighed = [float(costs[name] or 0.0) for name in self.study.costs]
            self.study.complete(which, [metric, *weighed], **facts)
            self._keep_best(which, metric)
        self._told(which)

    def _keep_best(self, which: int, metric: float) -> None:
        """Of ended trials only the best one's weights stay."""
        with self._lock:
            before = self.best
            better = before is None or metric > before[0]
            if better:
                self.best = metric, which
                if before is not None:
                    lighten(self.folder.trial(before[1]), model=False)
        lighten(self.folder.trial(which), model=better)

    def _told(self, trial_number: int) -> None:
        record = record_of(self.study.trial(trial_number), self.study.setting.fixed)
        text = f"trial {record.number} {record.state}"
        text += f" at epoch {len(record.curve)}" if record.state == "pruned" else ""
        text += f", {number(record.metric)}" if record.metric is not None else ""
        text += f" with {told(record.parameters)}{': ' if record.reason else ''}{record.reason}"
        self.tell("swept", {"number": record.number, "state": record.state, "text": text})
