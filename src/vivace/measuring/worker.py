"""The child's side of a measurement: opens a job under a plan, warms it up, runs timed blocks of steps."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from vivace.data.damage import Damage
from vivace.data.order import ordered
from vivace.errors import JobError, VivaceError
from vivace.job import Batch, Job
from vivace.ledger import Observation
from vivace.machine import Machine
from vivace.measuring.loading import limit_beside
from vivace.observing.observe import live_bytes, observe, peak_of
from vivace.observing.reference import profile_reference
from vivace.plan import Plan
from vivace.processes.launch import own_error
from vivace.session.opening import (
    LOOKING_SECONDS,
    call,
    checked_step,
    endless_batches,
    first_batches,
    largest_batch,
    readable,
    start,
    training_device,
)
from vivace.session.session import Session
from vivace.technique import Numerics, registry
from vivace.tensors.loaders import known_length
from vivace.tensors.randomness import Streams, derive
from vivace.tensors.trees import batch_size, tensors
from vivace.training.evaluation import Evaluation
from vivace.training.snapshot import Snapshot

FIRST_PASS_SECONDS = 10.0
LIBRARIES = (
    "sklearn",
    "skimage",
    "scipy",
    "PIL",
    "torchvision",
    "timm",
    "transformers",
    "torchmetrics",
    "pandas",
)


class Worker:
    """Serves `vivace.processes.launch.Child`: each method is a command with JSON arguments and answer."""

    def __init__(self, job: Job, machine: dict[str, Any]) -> None:
        self.job = job
        self.machine = Machine.from_dict(machine)
        self.session: Session | None = None
        self._before: Snapshot | None = None
        self._stream: Iterator[Any] = iter(())
        self._cached: Any = None
        self._waited = 0.0  # seconds for batches to arrive
        self._largest: list[Any] | None = None
        self._validation: list[Any] | None = None
        limit = os.environ.get("VIVACE_MEMORY_BYTES")
        if limit and self.machine.device.kind == "cuda":
            device = training_device(self.machine)
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, int(limit) / total), device)

    def check(self, plan: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run one step of the job as it is, or under the plan without which it does not fit into memory;
        return what it consists of. Raises JobError.
        """
        loader = call(self.job, "data")
        batches = first_batches(readable(loader, self.job), 4)
        with start(self.job, Plan.from_dict(plan or {}), self.machine, strict=False) as session:
            model = session.build.models[0]
            size = batch_size(batches[0])
            checked_step(session, batches[0])
            parameters = [p for m in session.build.models for p in m.parameters()]
            return {
                "signature": self._signature(session, batches[0]),
                "batch_size": size,
                "model": type(model).__name__,
                "num_parameters": sum(p.numel() for p in parameters),
                "optimizer": " and ".join(type(o).__name__ for o in session.optimizers) or "own step",
                "device": session.build.device.type,
                "steps_per_epoch": known_length(loader),
                "epochs": self.job.epochs,
                "has_metric": self.job.metric is not None,
                "metric_data": self.job.metric_data,
                "registered": [cls.name for cls in registry.registered()],
            }

    def libraries(self) -> list[str]:
        """Well-known slow imports that the job has made; later children find them imported already."""
        return [name for name in sys.modules if name.partition(".")[0] in LIBRARIES]

    def profile(self, plan: dict[str, Any] | None = None) -> dict[str, Any]:
        """The reference's `Profile`: what bounds the gain of each technique."""
        with start(self.job, Plan.from_dict(plan or {}), self.machine) as session:
            loader = call(self.job, "data")
            batches = first_batches(readable(loader, self.job), 4)
            found = profile_reference(session, self.job, batches)
            beside = limit_beside(session, self.job, loader, batches[0], found)
            found.features["loading_limit"] = found.features["loading_limit"] or beside
            return dataclasses.asdict(found)

    def choose(
        self, memory: int, allow: str, base: dict[str, Any], seconds: float = math.inf
    ) -> dict[str, Any]:
        """The cheapest decisions for the model's blocks within `memory` bytes; see `vivace.memory.choosing`.

        Raises Refused and AnswerIsNo as that does.
        """
        from vivace.memory.choosing import choose

        plan, largest = Plan.from_dict(base), self._largest_batch()
        numerics = Numerics[allow]
        chosen = choose(self.job, self.machine, memory, numerics, plan, largest=largest, seconds=seconds)
        return chosen.to_dict()

    def batches(self, plan: dict[str, Any], memory: int | None, seconds: float) -> dict[str, Any]:
        """Speed and peak against the batch's size; see `vivace.measuring.batches`. Raises Refused."""
        from vivace.measuring.batches import batch_curve

        return batch_curve(self.job, self.machine, Plan.from_dict(plan), memory, seconds).to_dict()

    def open(
        self, plan: dict[str, Any], strict: bool = True, seed: int = 0, settled: bool = True
    ) -> dict[str, Any]:
        """Open the job under a plan. Raises Refused where a technique declines.

        With `settled`, a plan that gains from the second pass over the data on is measured there.
        """
        begin = time.perf_counter()
        self.session = start(self.job, Plan.from_dict(plan), self.machine, seed=seed, strict=strict)
        self._before = Snapshot(self.session)
        loader = call(self.job, "data")
        self._stream = endless_batches(self.session, self.job, loader, seed)
        if settled and any(one.first_pass_differs for one in self.session.plan.techniques):
            self._stream = self._later_pass(loader, seed)
        return {"seconds": time.perf_counter() - begin}

    def _later_pass(self, loader: Iterable[Batch], seed: int) -> Iterator[Any]:
        """The batches of passes after the first, whose samples have all been read before.

        Of a long epoch as many as `FIRST_PASS_SECONDS` suffice to read once.
        """
        assert self.session is not None
        deadline, read = time.monotonic() + FIRST_PASS_SECONDS, 0
        first = ordered(loader, seed=seed, epoch=0, damage=Damage(self.job.damaged))
        for read, _ in enumerate(self.session.batches(first), 1):  # noqa: B007
            if time.monotonic() > deadline:
                break
        length = known_length(loader)
        whole = length is not None and read >= length
        if isinstance(loader, Iterator):
            loader = call(self.job, "data")
        return endless_batches(self.session, self.job, loader, seed, None if whole else read)

    def warm(self, seconds: float = 1.0) -> dict[str, Any]:
        """Step until compiled, cached and steady: at least 3 steps and `seconds` after the first, and up to
        three times as long while the last one is slow. Of two steps the faster one counts: the other may have
        compiled.
        """
        begin = time.perf_counter()
        self._steps(1)
        first = time.perf_counter() - begin
        times: list[float] = []
        while (
            len(times) < 2
            or sum(times) < seconds
            or (times[-1] >= 1.5 * min(times) and sum(times) < 3 * seconds)
        ):
            before = time.perf_counter()
            self._steps(1)
            times.append(time.perf_counter() - before)
        steady = sorted(times)[(len(times) - 1) // 2]
        extra = first + sum(times) - (len(times) + 1) * steady
        promise = self.session.promise.name.lower() if self.session is not None else ""
        return {"step_seconds": steady, "warmup_seconds": max(0.0, extra), "promise": promise}

    def block(self, steps: int, cached: bool = False) -> dict[str, float]:
        """Time `steps` steps, loading included; with `cached`, all on the last batch, without the loader.

        On a processor also what it worked for them, in all threads: ``processor``.
        """
        assert self.session is not None
        begin, worked, self._waited = time.perf_counter(), time.process_time(), 0.0
        samples = self._steps(steps, cached)
        done = {"seconds": time.perf_counter() - begin, "samples": samples, "waited": self._waited}
        if self.session.build.device.type == "cpu":
            done["processor"] = time.process_time() - worked
        return done

    def observe(self, evaluated: bool = False) -> dict[str, Any]:
        """What one step of the open session really did; on the largest batch, where batches differ.

        With `evaluated`, the peak is that of the metric on the largest validation batch where that is higher.
        """
        assert self.session is not None
        batches = [next(self._stream) for _ in range(2)] + self._largest_batch()
        seen = observe(self.session, batches)
        if evaluated and self.job.metric is not None:
            seen = dataclasses.replace(seen, peak_bytes=max(seen.peak_bytes, self._evaluation_peak()))
        return dataclasses.asdict(seen)

    def _largest_batch(self) -> list[Any]:
        """The largest batch, where batches differ."""
        if self._largest is None:
            with Streams(derive(0, "largest")):
                self._largest = largest_batch(readable(call(self.job, "data"), self.job), LOOKING_SECONDS)
        return self._largest

    def _evaluation_peak(self) -> int:
        """Bytes while the metric runs on one batch; 0 where it cannot do with one."""
        assert self.session is not None
        if self._validation is None:
            with Streams(derive(0, "largest")):
                field = "validation" if self.job.validation is not None else "data"
                found = largest_batch(readable(call(self.job, field), self.job), LOOKING_SECONDS)
                self._validation = found or first_batches(readable(call(self.job, field), self.job), 1)
        batches = self._validation
        one = dataclasses.replace(self.job, validation=lambda: batches)
        evaluation, device = Evaluation(one, self.session, 0), self.session.build.device
        with contextlib.suppress(JobError):
            return live_bytes(self.session, None) + peak_of(evaluation.metric, device)
        return 0

    def confirm(self, reference: dict[str, Any], evaluated: bool = False) -> dict[str, Any]:
        """Let every technique of the plan prove that it acted. Raises Refused with the technique's name.

        ``effect`` is a digest of what the step did: equal for settings that make no difference.
        """
        assert self.session is not None
        seen = Observation(**self.observe(evaluated))
        evidence = {}
        for technique in self.session.plan.techniques:
            try:
                evidence[technique.name] = technique.confirm(seen, Observation(**reference))
            except VivaceError as error:
                error.by(technique.name)
                raise
            except Exception as error:
                raise own_error(error).by(technique.name) from error
        facts = (
            seen.operators,
            seen.kernels,
            seen.dtypes,
            seen.compiled_graphs,
            seen.graph_breaks,
            seen.notes,
            seen.facts,
        )
        effect = hashlib.sha256(repr((facts, torch.get_num_threads())).encode()).hexdigest()
        return {"evidence": evidence, "peak_bytes": seen.peak_bytes, "effect": effect}

    def _steps(self, count: int, cached: bool = False) -> int:
        """Take steps as `train` does, which notes before each one what it takes to go back; the samples."""
        assert self.session is not None
        assert self._before is not None
        samples = 0
        for _ in range(count):
            if not cached:
                begin = time.perf_counter()
                self._cached = next(self._stream)
                self._waited += time.perf_counter() - begin
            self._before.take()
            self.session.step(self._cached)
            samples += batch_size(self._cached)
        if self.session.build.device.type == "cuda":
            torch.cuda.synchronize()
        return samples

    def _signature(self, session: Session, batch: Batch) -> str:
        shapes = [
            (n, tuple(p.shape), str(p.dtype)) for m in session.build.models for n, p in m.named_parameters()
        ]
        inputs = [(tuple(t.shape), str(t.dtype)) for t in tensors(batch)]
        optimizers = [
            (type(optimizer).__name__, sorted(f"{k}={v}" for k, v in optimizer.defaults.items()))
            for optimizer in session.optimizers
        ]
        text = repr((shapes, inputs, optimizers))
        return hashlib.sha256(text.encode()).hexdigest()[:12]
