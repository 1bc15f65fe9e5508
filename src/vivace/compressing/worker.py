"""The child that serves one form: makes its file, or opens it and runs timed calls."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy
import psutil
import torch

from vivace.job import Job
from vivace.serving import making
from vivace.serving.calls import outputs_file, read_arrays, write_arrays
from vivace.serving.effect import effect, told
from vivace.serving.envelope import REPEATABLE, distance, run
from vivace.serving.forms import REFERENCE, TRAINED_PLAN, Form, form_named
from vivace.serving.maker import Maker
from vivace.serving.planned import under_plan
from vivace.serving.serve import Arrays, Run, in_torch, opened
from vivace.serving.trained import plan_of
from vivace.serving.values import padding_computed

MOST_TIMES = 20_000


class Worker(Maker):
    """Serves `vivace.processes.launch.Child`: makes a form's file, or serves it."""

    def __init__(self, job: Job, run: str, folder: str, threads: int) -> None:
        super().__init__(job, run, folder, threads)
        self.serve: Run | None = None
        self.form: Form | None = None
        self.handle: Any = None
        self.batch, self.files = 1, Path()
        self._inputs: list[list[numpy.ndarray[Any, Any]]] = []
        self._times: list[float] = []
        self._turn = 0
        self._calls_a_step = 1
        self._before = 0

    def open(self, form: str, folder: str, batch: int, inputs: int) -> dict[str, Any]:
        """Be ready to serve the form in batches of so many samples, of so many different ones in turn. Where
        these differ in length, a step that is timed is a call with each: steps would differ else.
        """
        begin = time.perf_counter()
        self._inputs = self.calls.several(inputs, batch)
        self._calls_a_step = inputs if self.calls.ragged else 1
        self.form, self.batch, self.files = form_named(form), batch, Path(folder)
        self._before = _resident()
        if self.form.name == TRAINED_PLAN:
            plan = plan_of(Path(self.run))
            self.serve, self.handle = in_torch(under_plan(self.job, plan, self.material.flat))
            self.threads = torch.get_num_threads()  # a plan may set it
        elif self.form.in_process:
            self.serve, self.handle = in_torch(making.in_process(self.form, self.material))
        else:
            path = str(Path(folder) / self.form.file)
            self.serve, self.handle = opened(self.form.runtime, path, self.form.numbers, self.threads)
        return {"seconds": time.perf_counter() - begin, "calls_a_step": self._calls_a_step}

    def warm(self, seconds: float = 0.5) -> dict[str, Any]:
        """Call until steady: at least 5 times, or once with each length, and `seconds` after the first."""
        first = self._timed(1)
        begin = time.perf_counter()
        steps = [self._timed(self._calls_a_step) for _ in range(5 if self._calls_a_step == 1 else 1)]
        while time.perf_counter() - begin < seconds:
            steps.append(self._timed(self._calls_a_step))
        steady = median(steps)
        self._times = []
        return {"step_seconds": steady, "warmup_seconds": max(0.0, first - steady / self._calls_a_step)}

    def block(self, steps: int, cached: bool = False) -> dict[str, float | None]:
        """Time so many steps on the person's own samples, which are at hand, by all clocks."""
        begin, ready = time.process_time(), _ready_seconds()
        count = steps * self._calls_a_step
        seconds = self._timed(count)
        working, starved = time.process_time() - begin, _ready_seconds()
        found = {"seconds": seconds, "samples": count * self.batch, "waited": 0.0, "processor": working}
        return {
            **found,
            "threads": self.threads,
            "starved": None if ready is None or starved is None else max(0.0, starved - ready),
        }

    def _timed(self, count: int) -> float:
        assert self.serve is not None
        whole = 0.0
        for _ in range(count):
            arrays = self._inputs[self._turn % len(self._inputs)]
            self._turn += 1
            begin = time.perf_counter()
            self.serve(arrays)
            spent = time.perf_counter() - begin
            whole += spent
            if len(self._times) < MOST_TIMES:
                self._times.append(spent)
        return whole

    def latencies(self) -> dict[str, float]:
        """Seconds that half, and 99 of 100, of the timed calls took at most, and samples a second of all."""
        middle, late = numpy.percentile(self._times, [50, 99])
        count = len(self._times)
        throughput = count * self.batch / sum(self._times)
        return {"p50": float(middle), "p99": float(late), "calls": count, "samples_per_second": throughput}

    def peak(self) -> int:
        """Bytes by which the process grew at most since before the form was opened, while it serves."""
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self._timed(3)
        return max(0, _peak() - self._before)

    def bytes(self) -> int:
        """Of weights and buffers as they would be stored, of a form that runs in this process."""
        buffer = io.BytesIO()
        torch.save(self.handle.state_dict(), buffer)
        return buffer.getbuffer().nbytes

    def effect(self) -> dict[str, Any]:
        """How many operators that multiply really run in which numbers, and why some not in the form's."""
        assert self.form is not None
        assert self.serve is not None
        path = self.files / self.form.file
        ran = effect(self.form, self.handle, path, lambda: self.serve(self._inputs[0]))  # type: ignore[misc]
        return told(self.form, ran)

    def outputs(self, path: str) -> dict[str, Any]:
        """Answer every recorded call, and write what is returned."""
        assert self.serve is not None
        assert self.form is not None
        one_shape = self.form.runtime == "inductor" and not self.calls.ragged and self._answers_by_row()
        answer = partial(self._in_batches, self.serve) if one_shape else self.serve
        with padding_computed() if self.form.runtime == "torch" else contextlib.nullcontext():
            write_arrays(Path(path), [answer(arrays) for arrays in self.calls.inputs])
        return {}

    def _answers_by_row(self) -> bool:
        """Has each output of the model as it is a row for each sample, the same whatever samples are beside
        it? A loss, for one, has not, nor has what is normalized over the batch.
        """
        given, known = self.calls.inputs, read_arrays(self.folder / outputs_file(REFERENCE))
        rows = [self.calls.rows_of(arrays) for arrays in given]
        if not all(
            one.shape[:1] == (count,) for count, each in zip(rows, known, strict=True) for one in each
        ):
            return False
        model = partial(run, self.material.flat)  # which may be one that was trained further
        return all(
            one.shape == other.shape
            and distance([one], [other]) <= REPEATABLE * distance([one], [numpy.zeros_like(one)])
            for one, other in zip(model(given[0]), self._in_batches(model, given[0]), strict=True)
        )

    def _in_batches(self, serve: Run, arrays: Sequence[numpy.ndarray[Any, Any]]) -> Arrays:
        """A call in pieces of the batch that the form was compiled for, the last one filled up."""
        rows, found = self.calls.rows_of(arrays), []
        for start in range(0, rows, self.batch):
            taken = [(start + number) % rows for number in range(self.batch)]
            piece = [a[taken] if 0 in dims else a for a, dims in zip(arrays, self.calls.dynamic, strict=True)]
            found.append(serve(piece))
        return [numpy.concatenate(parts)[:rows] for parts in zip(*found, strict=True)]


def _ready_seconds() -> float | None:
    """Seconds that all threads of this process were ready to run and had no processor; None where the system
    does not tell.

    The second number of a thread's ``schedstat``: https://docs.kernel.org/scheduler/sched-stats.html
    """
    found = 0.0
    try:
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                found += int((thread / "schedstat").read_text(encoding="ascii").split()[1]) * 1e-9
    except (OSError, ValueError, IndexError):
        return None
    return found or None


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)


def _peak() -> int:
    """The largest resident size since `clear_refs`; the present one where the system does not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="ignore").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return _resident()
