"""The recorder: leads a running training loop through a few windows, then leaves torch as it found it.

Warm-up, timed steps (nothing but the clock), watched steps (who waits for a value, by file and line), traced
steps (torch's profiler), one counted step (operations, bytes, saved tensors). Results go into one folder.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vivace.files import replace_text
from vivace.inspection.quiet import ForeignLoad
from vivace.profiling.record import CUT, RECORD, TRACE, experiments, facts
from vivace.profiling.record.clock import PHASES, Clock, Step
from vivace.profiling.record.counting import CountedStep
from vivace.profiling.record.fetches import FetchSampler
from vivace.profiling.record.guard import Guard, T, described, reading
from vivace.profiling.record.hooks import BACKWARDS_ALONE, LoopHooks, Patches, named_range
from vivace.profiling.record.mixed import PrecisionWatch
from vivace.profiling.record.modules import ModuleRanges
from vivace.profiling.record.waits import WaitWatch
from vivace.tensors.modules import kinds_of

WARM_STEPS, MOST_WARM_STEPS = 3, 8
FEWEST_STEPS, MANY_STEPS, MOST_STEPS = 10, 100, 1500
TIMED_SECONDS, SLOW_SECONDS = 4.0, 30.0
MANY_SHARE = 0.25  # of the timed seconds: many steps are enough after it
WATCHED_STEPS, SYNCHRONIZED_STEPS, TRACED_STEPS = 5, 4, 3
MOST_TRACED_STEPS, MOST_COUNTED_STEPS = 6, 4  # where those before were unlike the others
LIKE = 0.1  # of the samples: steps that differ by less are alike
LONG_STEP_SECONDS = 4.0
DISTURBED_STEPS = 2


class Recorder:
    """Call `install` before the loop begins; `done` is True when the record is written.

    Args:
        folder: where the record and the trace go; made if missing.
        timed_seconds: how long the timed window lasts at least; a quarter of it where that is 100 steps.
    """

    def __init__(self, folder: Path, timed_seconds: float = TIMED_SECONDS) -> None:
        self.folder, self.timed_seconds = folder, timed_seconds
        self.done = False
        # Without the loop's own hooks there is nothing to record; any other part is left out alone.
        guard = Guard(self._give_up)
        self.clock = Clock(guard.looking(self._stepped))
        self.hooks = LoopHooks(self.clock, guard)
        self.precision = PrecisionWatch(self.hooks, Guard(self.note))
        self.waits = WaitWatch(self.clock, Guard(self.note))
        self.fetches = FetchSampler(self.clock, folder, Guard(self.note))
        self.patches = Patches(Guard(self.note))
        self.steps: list[Step] = []
        self.resident: list[int] = []
        self.course: list[tuple[Step, int]] = []  # every step until the window's end, and the peak after it
        self.graphs: list[int] = []
        self.synchronized: list[Step] = []
        self.document: dict[str, Any] = {"format": 1, "state": "warm"}
        self._state, self._in_state = "warm", 0
        self._entered = time.perf_counter()
        self._leave: Callable[[], None] = lambda: None
        self._undo = contextlib.ExitStack()  # what a window began to watch with, should its end fail
        self.catcher: experiments.CallCatcher | None = None
        self._modules: Any = None
        self._counted: Any = None
        self._profiler: Any = None
        self._graphs, self._not_finite = 0, 0
        self._tracing = False

    @property
    def counts(self) -> bool:
        """Are the operators of the next step counted?"""
        return self._state == "counted"

    def install(self) -> None:
        """Patch torch and begin to watch. Where that fails, torch is left as it was, and the error raised."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._pid = os.getpid()
        try:
            self.hooks.install()
            self.precision.install()
            self.fetches.install()
            self._compiled = experiments.watch_settings(self.patches, self.document)
            self.patches.replace(os, "_exit", self._leaving)  # which runs nothing of atexit
            if torch.distributed.is_available() and "RANK" not in os.environ:  # torchrun has not set it
                meeting = partial(self._meeting, self.folder)
                self.patches.replace(torch.distributed, "init_process_group", meeting)
        except Exception:
            self._restore()
            raise
        atexit.register(self.finish)

    def finish(self) -> None:
        """Write the record and restore torch; also where the loop ends before the last window."""
        try:
            self._finish()
        except Exception as error:  # within a call of the person's, or at the end of their script
            print(f"vivace: the profile cannot be written to {self.folder}: {error}", file=sys.stderr)

    def _finish(self) -> None:
        if self.done or os.getpid() != self._pid:  # a forked loader worker inherits this
            return
        self.done = True
        with contextlib.suppress(Exception):
            self._leave()
        self._leave = lambda: None
        self._read(self._average, None)
        self._read(self._describe, None)
        self._restore()
        self._forget()
        if not self.steps and ((self.folder / RECORD).exists() or multiprocessing.parent_process()):
            return  # a launcher or a loader worker, beside the process that trains
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._trace.is_file():
            self._trace.replace(self.folder / TRACE)
        replace_text(self.folder / RECORD, json.dumps(self.document, default=str))
        if self._state == "finished":
            atexit.unregister(self.finish)

    def _restore(self) -> None:
        """Leave torch as it was, last change first."""
        with contextlib.suppress(Exception):
            self._undo.close()
        self.patches.restore()
        self.fetches.stop()
        self.precision.restore()
        self.hooks.restore()

    def _forget(self) -> None:
        """Let go of the script's models, optimizers and batches, and of the trace."""
        self.hooks.forget()
        self.catcher = self._modules = self._counted = self._profiler = None

    def _give_up(self, error: Exception) -> None:
        """The loop's hooks failed: what was recorded until now is all that there will be."""
        self.note(error)
        self.finish()

    @property
    def _trace(self) -> Path:
        """Where the trace stands until the record does: several processes of a script may write theirs."""
        return self.folder / f"{TRACE}.{self._pid}"

    def _leaving(self, original: Callable[..., Any]) -> Any:
        def leave(status: int) -> Any:
            self.finish()
            return original(status)

        return leave

    def _meeting(self, folder: Path, original: Callable[..., Any]) -> Any:
        """Ranks that the script itself has started record into folders of their own, as torchrun's do."""

        def meet(*arguments: object, **keywords: object) -> Any:
            result = original(*arguments, **keywords)
            if rank := torch.distributed.get_rank():
                self.folder = self.fetches.folder = folder / f"rank-{rank}"
                self.folder.mkdir(parents=True, exist_ok=True)
            return result

        return meet

    def _stepped(self, step: Step) -> None:
        """Called by the clock between two steps of the person's loop."""
        if self.done:
            return
        if os.getpid() != self._pid and not self.course:  # a fork trains, and its parent has not
            self._pid = self.fetches.pid = os.getpid()
        self._in_state += 1
        if self._state in ("warm", "timed"):
            self.course.append((step, facts.peak_bytes()))
        if self._state == "timed":
            self.steps.append(step)
            self.resident.append(facts.resident_bytes())
            self.graphs.append(facts.num_graphs())
        elif self._state == "watched":
            self.waits.new_step()
            self._not_finite += step.not_finite
        elif self._state == "synchronized":
            self.synchronized.append(step)
        if self._is_over(step):
            self._next_state()
        if self._state not in ("warm", "timed") or self._in_state == 0:
            self.clock.restart()

    def _is_over(self, step: Step) -> bool:
        elapsed = time.perf_counter() - self._entered
        if self._state == "warm":
            graphs, before = facts.num_graphs(), self._graphs
            self._graphs = graphs
            return self._in_state >= WARM_STEPS and (graphs == before or self._in_state >= MOST_WARM_STEPS)
        if self._state == "timed":
            clean = sum(not s.interrupted for s in self.steps)
            enough = clean >= FEWEST_STEPS or len(self.steps) >= 3 * FEWEST_STEPS
            many = len(self.steps) >= MANY_STEPS and elapsed >= MANY_SHARE * self.timed_seconds
            patient = many or elapsed >= self.timed_seconds or len(self.steps) >= MOST_STEPS
            return (enough and patient) or (len(self.steps) >= 3 and elapsed >= SLOW_SECONDS)
        if self._state == "traced":
            self._mark_step()
            usual = self.document.setdefault("traced_usual", [])
            usual.append(is_usual(step, self._course))
            enough = self._in_state >= (TRACED_STEPS if any(usual) else MOST_TRACED_STEPS)
            return enough or step.wall_seconds > LONG_STEP_SECONDS
        if self._state == "counted" and self._in_state < MOST_COUNTED_STEPS:
            if not is_usual(step, self._course):  # its operations would be taken for those of every step
                self._undo.close()
                self._attempt(self._enter_counted)
                return False
            return True
        lengths = {"watched": WATCHED_STEPS, "synchronized": SYNCHRONIZED_STEPS, "counted": 0}
        return self._in_state >= lengths[self._state]

    @property
    def _course(self) -> list[Step]:
        return [step for step, _ in self.course]

    def _next_state(self) -> None:
        leave, self._leave = self._leave, lambda: None
        self._attempt(leave)
        order = ["warm", "timed", "watched", "synchronized", "traced", "counted", "finished"]
        self._state = order[order.index(self._state) + 1]
        if self._state == "synchronized" and not torch.cuda.is_available():
            self._state = "traced"
        if self._state == "traced" and threading.current_thread() is not threading.main_thread():
            # It may end within a step, and torch crashes where that happens in a trace or in what counts.
            self.document["on_a_thread"], self._state = True, "finished"
        self._in_state, self._entered = 0, time.perf_counter()
        self.document["state"] = self._state
        enter = {
            "timed": self._enter_timed,
            "watched": self._enter_watched,
            "synchronized": self._enter_synchronized,
            "traced": self._enter_traced,
            "counted": self._enter_counted,
            "finished": self._enter_finished,
        }
        if self._state in enter:
            self._attempt(enter[self._state])

    def _attempt(self, action: Callable[[], None]) -> None:
        """Begin or end a window. Where that fails, it is lost, and what it began to watch with is undone."""

        def failed(error: Exception) -> None:
            self.note(error)
            self._leave = lambda: None
            self._undo.close()

        reading(action, None, failed)

    def _read(self, look: Callable[[], T], otherwise: T) -> T:
        """A fact of the script's; one that cannot be read costs nothing else."""
        return reading(look, otherwise, self.note)

    def _enter_timed(self) -> None:
        self._others = ForeignLoad([os.getppid()])  # what started this rank has started the others, too
        self._dynamo = self._read(facts.dynamo, dict[str, Any]())
        self._live = self._read(facts.live_graph_tensors, None)
        self.hooks.fetch_cpu_seconds = 0.0
        self._faults = facts.page_faults()
        self._retries = facts.allocator_retries()
        self._allocated = facts.allocated_bytes()
        self.precision.begin()

    def _enter_watched(self) -> None:
        self._look_at_others()
        steps = max(1, len(self.steps))
        if self._live is not None and (now := self._read(facts.live_graph_tensors, None)) is not None:
            growth = {name: held - self._live[1].get(name, 0) for name, held in now[1].items()}
            grown = (name for name in growth if growth[name] >= steps // 2 > 0)
            held = sorted(grown, key=lambda name: -growth[name])[:3]
            self.document["live"] = {"before": self._live[0], "after": now[0], "steps": steps, "held": held}
        after = self._read(facts.dynamo, dict[str, Any]())
        self.document["dynamo"] = self._read(
            lambda: facts.dynamo_difference(self._dynamo, after), dict[str, Any]()
        )
        self.document["compiled_alive"] = any(reference() is not None for reference in self._compiled)
        faults = [
            (now - before) / steps for now, before in zip(facts.page_faults(), self._faults, strict=True)
        ]
        self.document["page_faults"], self.document["disk_faults"] = faults
        self.document["allocated"] = [self._allocated, facts.allocated_bytes()]
        self.document["allocator_retries"] = facts.allocator_retries() - self._retries
        self.document["data_cpu_seconds"] = self.hooks.fetch_cpu_seconds / steps
        self.document["precision"] = self.precision.result(steps)
        self._undo.callback(self._examine, False)
        self._examine(True)
        if not facts.compiles():  # the questions inside of compiled code would be compiled with our watch
            self._undo.callback(self.waits.restore)
            self.waits.install()
        self._leave = self._leave_watched

    def _look_at_others(self) -> None:
        self._others.disturb()
        self.document["foreign_share"] = self._others.largest

    def _leave_watched(self) -> None:
        self.waits.restore()
        self._examine(False)
        self.document["watched_steps"] = self.waits.num_steps
        self.document["precision"]["loss_not_finite"] = self._not_finite
        self.document["precision"]["tiny_gradients"] = self.precision.tiny_share()
        self.document["precision"]["changed_scaled"] = self.precision.changed_scaled()

    def _examine(self, wanted: bool) -> None:
        self.hooks.examine_losses = self.precision.examine = wanted

    def _enter_synchronized(self) -> None:
        self.hooks.synchronize = True
        self._leave = self._leave_synchronized

    def _leave_synchronized(self) -> None:
        self.hooks.synchronize = False
        steps = self.synchronized[1:]
        self.document["device_seconds"] = {p: statistics.fmean(s.seconds[p] for s in steps) for p in PHASES}

    def _enter_traced(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(
            activities=activities, record_shapes=True, profile_memory=True
        )
        self._modules = ModuleRanges(Guard(self.note), annotate=True)
        self.document["held_bytes"] = self._read(lambda: facts.held_bytes(self.hooks), 0)
        self._undo.callback(self._modules.restore)
        self._undo.callback(self._stop_profiler)
        self._profiler.start()
        self._tracing = True
        self.hooks.annotate = True
        self._range: Any = None
        self._mark_step()
        self._modules.install()
        self._leave = self._leave_traced

    def _mark_step(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
        self._range = named_range("vivace:step")

    def _leave_traced(self) -> None:
        self._modules.restore()
        roots = self._modules.roots
        self.document["precision"].update(self._read(lambda: self.precision.named(roots), dict[str, Any]()))
        self.document["features"] = self._read(lambda: kinds_of(roots.values()), dict[str, Any]())
        self.hooks.annotate = False
        named_range(CUT).__exit__(None, None, None)  # the last range is no whole step
        self._range.__exit__(None, None, None)
        self._stop_profiler()
        self.folder.mkdir(parents=True, exist_ok=True)  # scripts remove the runs of earlier days
        self._profiler.export_chrome_trace(str(self._trace))

    def _stop_profiler(self) -> None:
        if self._tracing:
            self._tracing = False
            self._profiler.stop()

    def _enter_counted(self) -> None:
        self.catcher = experiments.CallCatcher(self._modules.roots, Guard(self.note))
        self._undo.callback(self.catcher.restore)
        self._counted = CountedStep(self.hooks, Guard(self.note))
        self._undo.callback(self._counted.restore)
        self._counted.install()
        self._leave = self._leave_counted

    def _leave_counted(self) -> None:
        assert self.catcher is not None
        self._counted.restore()
        self.catcher.restore()
        if self._in_state:  # else the run ended within this step
            if not self._counted.guard.off:
                self.document.update(self._read(self._counted.kept, dict[str, Any]()))
                self.document.update(self._read(self._counted.work, dict[str, Any]()))
            self.document["rows"] = self.catcher.num_rows()

    def _enter_finished(self) -> None:
        self.document.update(facts.describe(self.hooks, self.note))
        self._read(self._average, None)
        self.document["first_touch"] = self._read(facts.first_touch, None)
        self.hooks.restore()  # copies of the model and of the optimizer are no part of the loop
        optimizers = list(self.hooks.optimizers.values())
        if self.catcher is not None:
            self._read(lambda: experiments.run(self.catcher, optimizers, self.document), None)
        self.finish()

    def note(self, error: Exception) -> None:
        """Keep a fault of the profile's own, which cost a part of it."""
        self.document.setdefault("problems", []).append(described(error))

    def _describe(self) -> None:
        if self._state == "timed":  # the run ended within the window
            self._read(self._look_at_others, None)
        document = self.document
        if "device" not in document:  # else described before the experiments, which take memory of their own
            document.update(facts.describe(self.hooks, self.note))
        document["resident"] = self.resident
        # A compiled update runs no hook of the optimizer's.
        document["unseen_updates"] = self.hooks.clock.unanswered >= BACKWARDS_ALONE and facts.compiles()
        document["replays"] = self.hooks.replays
        document["waits"] = self.waits.result()
        document.setdefault("precision", self.precision.result(len(self.steps)))
        document["fetch"] = self._read(self.fetches.result, dict[str, Any]())
        document["command"] = sys.argv

    def _average(self) -> None:
        """Means over the undisturbed steps of the timed window."""
        _mark_validation(self._course)
        starts = self.hooks.loader is not None and self.hooks.loader.num_workers > 0
        clean = _undisturbed(_typical(self.steps, starts))
        document = self.document
        document["steps"] = len(self.steps)
        document["clean_steps"] = len(clean)
        if clean:
            document["seconds"] = {p: statistics.fmean(s.seconds[p] for s in clean) for p in PHASES}
            document["step_seconds"] = statistics.fmean(s.wall_seconds for s in clean)
            document["median_step_seconds"] = statistics.median(s.wall_seconds for s in clean)
            samples = statistics.fmean(s.samples for s in clean) or self._rows()
            document["samples"], document["samples_known"] = samples or 1.0, samples > 0
            training = statistics.fmean(s.samples for s in _training(self.steps))
            document["samples_in_all"] = training or document["samples"]
            still = [
                s.wall_seconds
                for s, (a, b) in zip(self.steps[1:], itertools.pairwise(self.graphs), strict=True)
                if a == b
            ]
            document["quiet_seconds"] = min(still, default=None)
            document["walls"] = [s.wall_seconds for s in self.steps]
            document["clean_walls"] = [s.wall_seconds for s in clean]
            document["sizes"] = sorted({s.samples for s in clean})
            document["fetches"] = statistics.fmean(s.fetches for s in clean)
            document["sources"] = statistics.fmean(len(s.sources) for s in clean)
            document["backwards"] = statistics.fmean(s.backwards for s in clean)
            document["updates"] = statistics.fmean(s.updates for s in clean)
            document["course"] = [_brief(step, peak) for step, peak in self.course]
            document["retained_at"] = self.hooks.retained_at
            document["evaluated_at"] = self.hooks.evaluated_at
            broken = [s for s in self.steps if s.interrupted]
            document["interrupted"] = [
                {"wall": s.wall_seconds, "starting": s.starting_seconds, **s.seconds} for s in broken
            ]

    def _rows(self) -> float:
        """Samples a step of a loop without a DataLoader: what the model is called with, for each backward."""
        backwards = statistics.fmean(s.backwards for s in self.steps)
        return float(self.document.get("rows") or 0) * max(1.0, backwards)


def _training(steps: list[Step]) -> list[Step]:
    """Those without validation, if there are any."""
    return [step for step in steps if not step.validates] or steps


def _usual_size(steps: list[Step]) -> int:
    """Samples of the step that the sample in the middle is in: of a last batch of one sample that is none."""
    sizes = sorted(step.samples for step in steps)
    sums = itertools.accumulate(sizes)
    return next((size for size, total in zip(sizes, sums, strict=True) if 2 * total >= sum(sizes)), 0)


def _is_alike(samples: float, usual: float) -> bool:
    return abs(samples - usual) <= LIKE * usual


def is_usual(step: Step, steps: list[Step]) -> bool:
    """Is what it did what the steps of this loop do, without a validation and with as many samples?"""
    _mark_validation([*steps, step])
    validating = sum(one.validates for one in steps)
    rare = 2 * validating < len(steps)
    return not (rare and step.validates) and _is_alike(step.samples, _usual_size(_training(steps)))


def _typical(steps: list[Step], starts: bool) -> list[Step]:
    """The steps whose means stand for the loop: all that nothing interrupts, without odd last batches.

    Where a pass is so short that its first steps, in which a loader begins, hold much of the samples, those
    count too. What it takes workers to start, where it `starts` some, is then no part of them.
    """
    clean = [step for step in steps if not step.interrupted]
    if not steps:
        return []
    training = _training(steps)
    size = _usual_size(training)
    whole = [step for step in training if _is_alike(step.samples, size)]
    all_samples = statistics.fmean(step.samples for step in training)
    if clean and _is_alike(statistics.fmean(step.samples for step in clean), all_samples):
        alike = [step for step in clean if _is_alike(step.samples, size)]
        return alike if 2 * len(alike) >= len(clean) else clean
    return [_begun(step) for step in whole] if starts else whole


def _begun(step: Step) -> Step:
    waiting = min(step.starting_seconds, step.seconds["data"])
    seconds = {**step.seconds, "data": step.seconds["data"] - waiting}
    return dataclasses.replace(step, seconds=seconds, wall_seconds=step.wall_seconds - waiting)


def _undisturbed(steps: list[Step]) -> list[Step]:
    """Without the one or two longest steps of many: other processes of the machine disturb single steps."""
    dropped = min(DISTURBED_STEPS, len(steps) // FEWEST_STEPS)
    limit = sorted(step.wall_seconds for step in steps)[: len(steps) - dropped][-1] if steps else 0.0
    return [step for step in steps if step.wall_seconds <= limit]


def _mark_validation(steps: list[Step]) -> None:
    """Where gradients stay on in validation, or it needs no loader, what shows it is rare: many fetches for
    a backward pass, or a module that is put into evaluation mode. A loop that does so in each step is none.
    """
    usual = statistics.median(step.fetches for step in steps) if steps else 0
    for step in steps:
        step.validates |= step.fetches > 2 * usual and step.backwards < step.fetches
    if 2 * sum(step.validates for step in steps) < len(steps):
        for step in steps:
            step.interrupted |= step.validates


def _brief(step: Step, peak: int) -> dict[str, Any]:
    """What the course of the peak is read from."""
    return {
        "peak": peak,
        "wall": step.wall_seconds,
        "elements": step.elements,
        "validates": step.validates,
        "gradients": not step.without_gradients,
        "retains": step.retains,
    }
