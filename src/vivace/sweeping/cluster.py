"""Trials on a Ray cluster: Ray Tune finds each a place, and begins it again where its place is lost.

What is tried, which trials stop early and what they reached is asked of the same study as on one machine, in
this process alone; Tune is told which trial comes next and whether it goes on. On the cluster a trial is the
run in a process of its own that it is here, in the same folder, which all nodes must share: begun again, it
goes on from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import queue
import shutil
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from vivace.errors import ChildFailed, InputError, VivaceError
from vivace.processes.launch import Child, Source
from vivace.sweeping.folder import LOG, RAY, SweepFolder
from vivace.sweeping.packing import SILENCE_SECONDS
from vivace.words import count

try:
    import ray
    from ray import tune

    from vivace.processes.on_ray import MOST_LOSSES, REACHED_SECONDS, Connection, lines_of, shares_of
except ImportError:
    raise InputError("a sweep on a Ray cluster needs Ray: pip install 'vivace[ray]'") from None


class Place(tune.Trainable):  # type: ignore[misc]
    """A place on a node, on which one trial after another is run; a step lasts until one says something."""

    def setup(
        self, config: dict[str, Any], entry: str, source: Source, threads: int, log: str, path: list[str]
    ) -> None:
        """What Ray Tune calls first, with the parameters that `Cluster.begin` has bound."""
        sys.path += [folder for folder in path if folder not in sys.path]
        self._start = partial(Child, entry, source, {"threads": threads}, log=Path(log))
        self._child: Child | None = None
        self._trial = config["trial"]

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """What Ray Tune calls to run another trial at this place, in a new process."""
        self.cleanup()
        self._trial = new_config["trial"]
        return True

    def step(self) -> dict[str, Any]:
        """The next message of the trial's process: what an epoch brought, or how it ended."""
        try:
            if self._child is None:
                self._child = self._start()
                told = {"command": "train", "arguments": json.loads(self._trial), "seconds": SILENCE_SECONDS}
                said: object = told
            else:
                said = {"prune": False}  # a pruned trial has no further step
            turn = self._child.say(said, "train", SILENCE_SECONDS)
        except VivaceError as error:
            turn = {"error": error.to_dict()}
        return {"message": json.dumps(turn), "done": "question" not in turn}

    def cleanup(self) -> None:
        """End the trial's process, which has come to its end or waits for an answer."""
        if self._child is not None:
            self._child.close()
        self._child = None


class Running:
    """A trial that waits for a place or has one."""

    def __init__(self, arguments: dict[str, Any], heard: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.config = {"trial": json.dumps(arguments)}
        self.answer: Future[dict[str, Any]] = Future()
        self._heard = heard

    def goes_on(self, turn: dict[str, Any]) -> bool:
        """Hear what it says; False where that was its last word, or where it is pruned."""
        if "question" not in turn:
            self.end(VivaceError.from_dict(turn["error"]) if "error" in turn else turn["answer"])
            return False
        try:
            if self._heard(turn["question"])["prune"]:
                self.end({"pruned": True, **turn["question"]})
        except Exception as error:  # of the journal; it is the thread's that waits
            self.end(error)
        return not self.answer.done()

    def end(self, how: dict[str, Any] | BaseException) -> None:
        """The thread that waits for it goes on; what comes first counts."""
        if self.answer.done():
            return
        if isinstance(how, BaseException):
            self.answer.set_exception(how)
        else:
            self.answer.set_result(how)


class Desk(tune.search.Searcher, tune.Stopper):  # type: ignore[misc]
    """Whom Tune asks for the next trial, and whether one goes on; called in Tune's thread alone."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: queue.SimpleQueue[Running] = queue.SimpleQueue()
        self.running: dict[str, Running] = {}
        self.closed = threading.Event()

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune writes copies of what it asks; the journal is what a sweep goes on from

    def save(self, checkpoint_path: str) -> None:
        """Nothing: Ray Tune asks for copies, and none is gone on from; see `__getstate__`."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing: what a sweep goes on from is its journal; see `__getstate__`."""

    def suggest(self, trial_id: str) -> Any:
        """The next trial; None while there is none."""
        if self.closed.is_set():
            return self.FINISHED
        with contextlib.suppress(queue.Empty):
            self.running[trial_id] = self.waiting.get_nowait()
            return self.running[trial_id].config
        return None

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Does the trial end here?"""
        return not self.running[trial_id].goes_on(json.loads(result["message"]))

    def stop_all(self) -> bool:
        """Does the sweep need Tune no longer?"""
        return self.closed.is_set()

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        """A trial has left its place; one that has not said its last word has lost it too often."""
        why = f"Ray lost its process or its node, and begins it again up to {count(MOST_LOSSES, 'time')}"
        self.running.pop(trial_id).end(ChildFailed(why))

    def end(self, error: BaseException) -> None:
        """End all trials with an error."""
        self.closed.set()
        while not self.waiting.empty():
            self.waiting.get().end(error)
        for one in list(self.running.values()):
            one.end(error)


class Cluster:
    """A connection to a Ray cluster, and the trials that Tune runs there; closed, all of them are ended.

    Args:
        address: ``auto``, or ``HOST:PORT`` of the cluster's head; a connection that this process has is used.
        folder: of the sweep.
        workers: trials at a time; None: one a GPU, or on a cluster without any, one a core.

    Raises InputError where there is no cluster, or a node of it cannot run trials, FolderError where one does
    not see `folder`.
    """

    def __init__(self, address: str, folder: SweepFolder, workers: int | None) -> None:
        self.lost = ""
        self._folder, self._desk, self._thread = folder, Desk(), threading.Thread()
        self._connection = Connection(address)
        try:
            self._connection.require_able(folder.path)
        except BaseException:
            self._connection.close()
            raise
        self.shares, self._resources = shares_of(self._connection.nodes, workers)
        self.name = f"Ray {ray.__version__} on {count(len(self._connection.nodes), 'node')}"

    def begin(self, entry: str, source: Source) -> None:
        """Let Tune wait for trials; each is the command ``train`` of `entry`."""
        place = tune.with_parameters(
            Place,
            entry=entry,
            source=source,
            threads=self.shares[1],
            log=str(self._folder.path.resolve() / LOG),
            path=sys.path,
        )
        store = self._folder.path.resolve() / RAY
        shutil.rmtree(store, ignore_errors=True)
        tuner = tune.Tuner(
            tune.with_resources(place, self._resources),
            tune_config=tune.TuneConfig(
                search_alg=self._desk,
                num_samples=-1,
                reuse_actors=True,
                trial_dirname_creator=lambda trial: trial.trial_id,
            ),
            run_config=tune.RunConfig(
                name="trials",
                storage_path=str(store),
                stop=self._desk,
                failure_config=tune.FailureConfig(max_failures=MOST_LOSSES),
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                verbose=0,
            ),
        )
        self._thread = threading.Thread(target=self._tuned, args=(tuner,), name="tune", daemon=True)
        self._thread.start()

    def train(self, heard: Callable[[dict[str, Any]], dict[str, Any]], **arguments: object) -> dict[str, Any]:
        """Run one trial to its end; what `vivace.sweeping.trial.Trial.train` answers, or raises."""
        running = Running(arguments, heard)
        self._desk.waiting.put(running)
        if self._desk.closed.is_set():
            raise VivaceError("the sweep is being stopped")
        return running.answer.result()

    def stop(self) -> None:
        """End all trials; the study hears nothing of them."""
        self._desk.end(VivaceError("the sweep is being stopped"))

    def close(self) -> None:
        """End all trials and leave the cluster."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join(REACHED_SECONDS)
        self._connection.close()
        shutil.rmtree(self._folder.path / RAY, ignore_errors=True)

    def _tuned(self, tuner: tune.Tuner) -> None:
        try:
            tuner.fit()
        except Exception as error:
            if not self._desk.closed.is_set():
                self.lost = f"the Ray cluster was lost: {lines_of(error)[0]}"
        self._desk.end(KeyboardInterrupt())  # a sweep without its cluster ends as on Ctrl-C
