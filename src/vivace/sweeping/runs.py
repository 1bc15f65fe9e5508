"""The parent's side of trials: who runs next, in which process, and what becomes of its end."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

from vivace.errors import AnswerIsNo, FolderError, VivaceError
from vivace.events import Tell
from vivace.plan import Plan
from vivace.processes.launch import Child, Source, preload
from vivace.sweeping import trial as child_side
from vivace.sweeping.folder import LOG, SweepFolder, lighten
from vivace.sweeping.record import record_of
from vivace.sweeping.space import told
from vivace.sweeping.study import Asked, Study
from vivace.words import number

SILENCE_SECONDS = 7 * 86400.0  # an epoch may take long; a child that hangs is for the person to end
MOST_FAILURES = 5  # at the beginning, without one result

Work = Callable[[], None]


class Runs:
    """Runs trials of one study, `workers` at a time, each in its own process with `threads` threads.

    Args:
        study, folder, source: of the sweep.
        plan: under which every trial trains.
        seed: of every trial: what differs between them is their parameters alone.
        tell: hears ``swept`` of every trial.
    """

    def __init__(
        self,
        study: Study,
        folder: SweepFolder,
        source: Source,
        plan: Plan,
        *,
        seed: int,
        workers: int,
        threads: int,
        tell: Tell,
    ) -> None:
        self.study, self.folder, self.source, self.plan = study, folder, source, plan
        self.seed, self.workers, self.threads, self.tell = seed, workers, threads, tell
        self.best: tuple[float, int] | None = None
        self._lock = threading.RLock()
        self._children: set[int] = set()
        self._stopping = self._preloaded = False

    def search(self, wanted: int) -> None:
        """Run trials until `wanted` count, those of earlier sessions too, or none is left to try.

        Raises AnswerIsNo where the first ones all fail, FolderError where the folder cannot be written.
        """
        waiting = self.study.left_over()
        running = [0]

        def following() -> Work | None:
            asked = waiting.pop(0) if waiting else None
            if asked is None and len(self.study.counted()) + running[0] < wanted:
                asked = self.study.ask()
            if asked is None:
                return None
            running[0] += 1
            return partial(self._counted_down, running, partial(self._try, asked))

        self._side_by_side(following)

    def repeat(self, configurations: list[tuple[Asked, int]]) -> dict[tuple[int, int], float]:
        """Train configurations under other seeds, each a pair; metrics by trial and seed, of those that
        succeed.
        """
        waiting, found = list(configurations), dict[tuple[int, int], float]()

        def once(asked: Asked, seed: int) -> None:
            out = self.folder.seed(asked.number, seed)
            with contextlib.suppress(VivaceError):
                answer = self._train(asked, str(out), seed, lambda _: {"prune": False})
                found[asked.number, seed] = answer["metric"]
                text = f"trial {asked.number} under seed {seed}: {number(answer['metric'])}"
                self.tell(
                    "swept", {"number": asked.number, "state": "complete", "text": text, "seed": seed}
                )
            lighten(out, model=False)

        self._side_by_side(lambda: partial(once, *waiting.pop(0)) if waiting else None)
        return found

    def _counted_down(self, running: list[int], work: Work) -> None:
        try:
            work()
        finally:
            running[0] -= 1

    def _side_by_side(self, following: Callable[[], Work | None]) -> None:
        """Do one piece of work after another, `workers` at once; Ctrl-C and errors end all of them."""
        with ThreadPoolExecutor(self.workers, "sweep") as pool:
            running: set[Future[None]] = set()
            try:
                while True:
                    while len(running) < self.workers and (work := following()) is not None:
                        running.add(pool.submit(work))
                    if not running:
                        return
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    for one in done:
                        one.result()
            except BaseException:
                self._stop()
                raise

    def _stop(self) -> None:
        """End all child processes; their trials stay open in the journal."""
        with self._lock:
            self._stopping = True
            for pid in self._children:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)

    def _try(self, asked: Asked) -> None:
        """Run one trial and tell the study how it ended."""
        out, curve, begin = self.folder.trial(asked.number), dict[int, float](), time.monotonic()

        def heard(found: dict[str, Any]) -> dict[str, Any]:
            curve[found["epoch"]] = found["metric"]
            return {"prune": self.study.report(asked.number, found["epoch"], found["metric"])}

        try:
            answer = self._train(asked, str(out), self.seed, heard)
        except FolderError:
            raise
        except VivaceError as error:
            if not self._stopping:
                self._failed(asked, error, curve, time.monotonic() - begin)
            return
        self._ended(asked, answer, curve, time.monotonic() - begin)

    def _train(
        self, asked: Asked, out: str, seed: int, heard: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> dict[str, Any]:
        with self._child(child_side.ENTRY) as child:
            answer = child.ask(
                "train",
                SILENCE_SECONDS,
                reply=heard,
                parameters=asked.parameters,
                plan=self.plan.to_dict(),
                out=out,
                seed=seed,
            )
            self._preload(child)
            return dict(answer)

    @contextlib.contextmanager
    def _child(self, entry: str) -> Iterator[Child]:
        with self._lock:
            if self._stopping:
                raise VivaceError("the sweep is being stopped")
            child = Child(entry, self.source, {"threads": self.threads}, log=self.folder.path / LOG)
            self._children.add(child.pid)
        try:
            with child:
                yield child
        finally:
            with self._lock:
                self._children.discard(child.pid)

    def _preload(self, child: Child) -> None:
        """Once: let later children find the job's slow imports made."""
        if not self._preloaded:
            names = child.ask("libraries", SILENCE_SECONDS)
            with self._lock:
                if not self._preloaded:
                    self._preloaded = True
                    preload(names)

    def _failed(self, asked: Asked, error: VivaceError, curve: dict[int, float], seconds: float) -> None:
        facts = {"reason": str(error), "code": str(error.code), "kind": error.kind}
        self.study.fail(asked.number, curve=curve, seconds=seconds, **facts)
        lighten(self.folder.trial(asked.number), model=False)
        self._told(asked.number)
        counted = self.study.counted()
        if len(counted) == MOST_FAILURES and all(record_of(t, {}).state == "failed" for t in counted):
            raise AnswerIsNo(
                f"the first {MOST_FAILURES} trials all failed; the last one with {told(asked.parameters)}: {error}"
            )

    def _ended(
        self, asked: Asked, answer: dict[str, Any], curve: dict[int, float], seconds: float
    ) -> None:
        which, metric = asked.number, answer["metric"]
        facts = {"metric": metric, "curve": curve, "seconds": seconds}
        facts |= {"costs": {"seconds": answer["step_seconds"]} if answer.get("step_seconds") else {}}
        facts |= {"peak_bytes": answer.get("peak_bytes"), "epochs": answer.get("epoch")}
        if answer["pruned"]:
            self.study.prune(which, **facts)
            lighten(self.folder.trial(which), model=False)
        else:
            self.study.complete(which, [metric], **facts)
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
