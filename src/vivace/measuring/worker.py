"""The child's side of a measurement: opens a job under a plan, warms it up, runs timed blocks of steps."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from vivace.data.damage import Damage
from vivace.data.order import ordered, share_of
from vivace.errors import JobError, VivaceError
from vivace.inspection.limits import free_memory
from vivace.job import Batch, Job
from vivace.ledger import Observation
from vivace.machine import Machine
from vivace.measuring.beside import evaluation_seconds, saving_seconds, tried_evaluation
from vivace.measuring.loading import limit_beside
from vivace.observing.observe import COUNTED_STEPS, live_bytes, minor_faults, observe, peak_of
from vivace.observing.reference import profile_reference
from vivace.plan import Plan
from vivace.processes.child import begun_after
from vivace.processes.launch import own_error
from vivace.session.opening import (
    LOOKING_SECONDS,
    call,
    checked_step,
    first_batches,
    largest_batch,
    readable,
    seed_everything,
    start,
    training_device,
)
from vivace.session.session import Session
from vivace.technique import Numerics, registry
from vivace.tensors.allocator import retries
from vivace.tensors.loaders import known_length
from vivace.tensors.randomness import Streams, derive
from vivace.tensors.trees import Again, batch_size, digest, tensors
from vivace.training.evaluation import Evaluation
from vivace.training.feed import Feed
from vivace.training.ranks import Ranks, met_under
from vivace.training.strides import Strides
from vivace.training.tuned import consists_of
from vivace.training.watch import Unwatched

FIRST_PASS_SECONDS = 10.0
EXIT_SHARE = 0.35  # of importing torch: to take that apart again as Python ends, of three tries 0.36 to 0.44
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
IDLE_SECONDS = 24 * 3600.0  # of ranks between commands, each of which has a limit of its own

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


Command = Callable[Concatenate["Worker", Arguments], Answer]


def _together(what: str) -> Callable[[Command[Arguments, Answer]], Command[Arguments, Answer]]:
    """A command that several ranks answer together: where it fails on one, the others hear why.

    `what` is told of a rank for which the others wait.
    """

    def wrapped(command: Command[Arguments, Answer]) -> Command[Arguments, Answer]:
        @functools.wraps(command)
        def answered(self: Worker, /, *arguments: Arguments.args, **named: Arguments.kwargs) -> Answer:
            with self.ranks.answering(what) if self.ranks.world_size > 1 else contextlib.nullcontext():
                return command(self, *arguments, **named)

        return answered

    return wrapped


class Worker:
    """Serves `vivace.processes.launch.Child`: each method is a command with JSON arguments and answer.

    Of several ranks, which meet under the name `meeting`, each has one, and gets its share of every batch.
    """

    def __init__(self, job: Job, machine: dict[str, Any], meeting: str = "", threads: int = 0) -> None:
        self.job = job
        self.machine = Machine.from_dict(machine)
        self.ranks = met_under(meeting, IDLE_SECONDS) if meeting else Ranks()
        self.session: Session | None = None
        self._strides: Strides | None = None
        self._feed: Feed | None = None
        self._stream: Generator[Any, None, None] = (one for one in list[Any]())
        self._again: int | None = None  # so many of the first epoch's batches over and over
        self._share_read = 1.0  # of the data, in the first pass
        self._waited = 0.0  # seconds for batches to arrive
        self._faults: list[int] = []  # page faults until each of the later steps that warmed up
        self._cached: Again | None = None  # the batch of the steps without the loader
        self._largest: list[Again] | None = None
        self._validation: list[Any] | None = None
        self._remembered: list[tuple[torch.Tensor, torch.Tensor]] = []
        if threads and self.machine.device.kind == "cpu":
            torch.set_num_threads(threads)
        limit = os.environ.get("VIVACE_MEMORY_BYTES")
        if limit and self.machine.device.kind == "cuda":
            device = training_device(self.machine)
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, int(limit) / total), device)

    def check(self, plan: dict[str, Any] | None = None, num_ranks: int = 1) -> dict[str, Any]:
        """Run one step of the job as it is, or under the plan without which it does not fit into memory;
        return what it consists of. Raises JobError.

        Of `num_ranks` that are to train together it is the step of one, alone.
        """
        importing, loading = begun_after()
        begin = time.perf_counter()
        loader = call(self.job, "data")
        arrived = list[float]()
        batches = first_batches(_noted(readable(loader, self.job), arrived), 4)
        reading, begin = arrived[0] - begin, time.perf_counter()
        with start(self.job, Plan.from_dict(plan or {}), self.machine, strict=False) as session:
            opening = time.perf_counter() - begin
            model = session.build.models[0]
            size, part = batch_size(batches[0]), share_of(batches[0], 0, num_ranks)
            consists = consists_of(self.job, session, loader)  # as it is opened: a step may make buffers
            checked_step(session, part)
            parameters = [p for m in session.build.models for p in m.parameters()]
            return {
                "signature": self._signature(session, part, num_ranks),
                **consists,
                "batch_size": size,
                "model": type(model).__name__,
                "num_parameters": sum(p.numel() for p in parameters),
                "optimizer": " and ".join(type(o).__name__ for o in session.optimizers) or "own step",
                "device": session.build.device.type,
                "steps_per_epoch": known_length(loader),
                "epochs": self.job.epochs,
                "start_seconds": importing + loading + reading + opening,
                "exit_seconds": EXIT_SHARE * importing,
                "has_metric": self.job.metric is not None,
                "metric_data": self.job.metric_data,
                "registered": [cls.name for cls in registry.registered()],
            }

    def libraries(self) -> list[str]:
        """Well-known slow imports that the job has made; later children find them imported already."""
        return [name for name in sys.modules if name.partition(".")[0] in LIBRARIES]

    def profile(
        self, plan: dict[str, Any] | None = None, num_ranks: int = 1, folder: str | None = None
    ) -> dict[str, Any]:
        """The reference's `Profile`: what bounds the gain of each technique; with `num_ranks` as `check`.

        Its features hold what a training takes beside its steps: ``evaluation_seconds`` or
        ``metric_fault``, why the metric fails; and, on the disk of `folder`, ``checkpoint_seconds`` and
        ``end_seconds``.
        """
        with start(self.job, Plan.from_dict(plan or {}), self.machine) as session:
            loader = call(self.job, "data")
            batches = [share_of(b, 0, num_ranks) for b in first_batches(readable(loader, self.job), 4)]
            first = Again(batches[0])
            found = profile_reference(session, self.job, batches, num_ranks)
            if num_ranks == 1:  # the cores of several are not divided among them
                beside = limit_beside(session, self.job, loader, first(), found)
                found.features["loading_limit"] = found.features["loading_limit"] or beside
            evaluated = tried_evaluation(session, self.job)
            found.features["evaluation_seconds"], found.features["metric_fault"] = evaluated
            if folder is not None:
                saving = saving_seconds(session, Path(folder))
                found.features.update(zip(("checkpoint_seconds", "end_seconds"), saving, strict=True))
            return dataclasses.asdict(found)

    @_together("its data")
    def same_data(self) -> None:
        """Raises JobError where the ranks read other batches than rank 0, or another number of them."""
        seed_everything(0)
        loader = call(self.job, "data")
        length = known_length(loader)
        read = ordered(loader, seed=0, epoch=0, damage=Damage.of(self.job))
        (first,) = first_batches((batch for batch in read if batch is not None), 1)
        found = self.ranks.gather((length, digest(first)))
        length, own = found[0]
        for rank, (other, content) in enumerate(found):
            if other != length:
                raise JobError(
                    f"rank 0 has {length} batches and rank {rank} has {other}: give every rank the same data"
                )
            if content != own:
                raise JobError(
                    f"ranks 0 and {rank} read different batches, and Vivace splits every batch itself: give "
                    "the data's shuffle a seed, and leave out what splits them by rank"
                )

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

    @_together("its start under a plan")
    def open(
        self, plan: dict[str, Any], strict: bool = True, seed: int = 0, settled: bool = True
    ) -> dict[str, Any]:
        """Open the job under a plan. Raises Refused where a technique declines.

        With `settled`, a plan that gains from the second pass over the data on is measured there.
        """
        begin = time.perf_counter()
        self.session = start(self.job, Plan.from_dict(plan), self.machine, seed=seed, strict=strict)
        self._strides = Strides(self.session, self.ranks, Unwatched())
        self._strides.begin()
        self._feed = Feed(self.job, self.ranks, seed, None, lambda text: None)
        self._again, self._share_read, self._cached = None, 1.0, None
        if settled and any(one.first_pass_differs for one in self.session.plan.techniques):
            self._again = self._read_first(self._feed)
        self._stream = self._endless(self._feed, self._again)
        places = self.ranks.gather((socket.gethostname(), os.getpid()))
        here = [pid for host, pid in places if host == socket.gethostname()]
        return {"seconds": time.perf_counter() - begin, "processes": here}

    def _endless(self, feed: Feed, again: int | None) -> Generator[Any, None, None]:
        """This rank's batches of one epoch after another, as `train` feeds them.

        With `again`, the first so many batches of the first epoch over and over. Raises JobError where a pass
        is empty.
        """
        assert self.session is not None
        assert self._strides is not None
        position = self._strides.position
        for epoch in itertools.count():
            position.epoch, position.batch = 0 if again else epoch, 0
            drawn, batches = 0, feed.batches(self.session, position)
            for drawn, batch in enumerate(itertools.islice(batches, again), 1):  # noqa: B007
                if batch is None:
                    position.batch += 1
                else:
                    yield batch
            if not drawn:
                later = " when it was read again" if epoch else ""
                raise JobError(f"the Job's data() gave no batch{later}")

    def _read_first(self, feed: Feed) -> int | None:
        """Read all samples once, as what comes is to be timed as in passes after the first.

        Of a long epoch as many batches as `FIRST_PASS_SECONDS` suffice for: that number of them, else None.
        """
        assert self.session is not None
        deadline, read, loader = time.monotonic() + FIRST_PASS_SECONDS, 0, feed.own_loader
        rank, num = self.ranks.rank, self.ranks.world_size
        damage = Damage.of(self.job)
        first = ordered(loader, seed=feed.seed, epoch=0, damage=damage, rank=rank, world_size=num)
        for read, _ in enumerate(self.session.batches(first), 1):  # noqa: B007
            if time.monotonic() > deadline:
                break
        read, length = min(self.ranks.gather(read)), known_length(loader)
        self._share_read = 1.0 if length is None else min(1.0, read / max(1, length))
        return None if length is not None and read >= length else read

    @_together("its first steps")
    def warm(self, seconds: float = 1.0) -> dict[str, Any]:
        """Step until compiled, cached and steady: at least 3 steps and `seconds` after the first, and up to
        three times as long while the last one is slow. Of two steps the faster one counts: the other may have
        compiled.
        """
        first = self._step_seconds()
        times: list[float] = []
        faults = [minor_faults()]
        while (
            len(times) < 2
            or sum(times) < seconds
            or (times[-1] >= 1.5 * min(times) and sum(times) < 3 * seconds)
        ):
            times.append(self._step_seconds())
            faults.append(minor_faults())
        self._faults = faults[len(times) // 2 :]
        steady = sorted(times)[(len(times) - 1) // 2]
        extra = first + sum(times) - (len(times) + 1) * steady
        promise = self.session.promise.name.lower() if self.session is not None else ""
        return {"step_seconds": steady, "warmup_seconds": max(0.0, extra), "promise": promise}

    def _step_seconds(self) -> float:
        """Seconds of one step, of the slowest rank."""
        before = time.perf_counter()
        self._steps(1)
        return self.ranks.largest(time.perf_counter() - before)[0]

    @_together("timed steps")
    def block(self, steps: int, cached: bool = False) -> dict[str, float]:
        """Time `steps` steps, loading included; with `cached`, all on one batch, without the loader.

        ``full`` counts how often the GPU's memory was, so that the allocator had to start anew. On a
        processor also what it worked for them, in all threads: ``processor``. Several ranks begin at
        once and end when the slowest does; for them the processor's clock, which stands while one waits for
        another, would not tell.
        """
        assert self.session is not None
        self.ranks.gather(None)
        device = self.session.build.device
        if cached and self._cached is None:
            self._cached = Again(next(self._stream))
        given = self._cached if cached else None
        full, begin, worked, self._waited = retries(device), time.perf_counter(), time.process_time(), 0.0
        samples = self._steps(steps, given)
        seconds, waited = self.ranks.largest(time.perf_counter() - begin, self._waited)
        done = {"seconds": seconds, "samples": samples, "waited": waited, "full": retries(device) - full}
        if device.type == "cpu" and self.ranks.world_size == 1:
            done |= {"processor": time.process_time() - worked, "threads": torch.get_num_threads()}
        return done

    def remember(self) -> None:
        """Keep the weights and the optimizer's state as they are now, for `again`: on a processor, in one
        process, where a fourth of the free memory suffices.

        There the speed of a step depends on what was trained before: numbers below the smallest normal one,
        such as a gradient behind attention that has become sharp, take many times as long.
        """
        session = self.session
        assert session is not None
        if session.build.device.type != "cpu" or self.ranks.world_size > 1:
            return
        held = [tensor.detach() for tensor in _trained(session) if tensor.layout == torch.strided]
        if sum(tensor.nbytes for tensor in held) <= free_memory() / 4:
            self._remembered = [(tensor, tensor.clone()) for tensor in held]

    @_together("its first batches again")
    def again(self) -> None:
        """Put the weights and the optimizer's state back to what they were when they were kept, and begin
        with the first batches again: later ones may be longer, or lie on a disk that a candidate then does
        not wait for any more.
        """
        assert self._feed is not None
        self._stream.close()
        self._stream = self._endless(self._feed, self._again)
        self._steps(1)  # for which workers start
        for tensor, kept in self._remembered:
            tensor.copy_(kept)

    def evaluate(self) -> float | None:
        """What one evaluation of the metric takes under the open plan; see `evaluation_seconds`."""
        assert self.session is not None
        return evaluation_seconds(self.session, self.job)

    @_together("an observed step")
    def observe(self, evaluated: bool = False) -> dict[str, Any]:
        """What one step of the open session really did; on the largest batch, where batches differ.

        With `evaluated`, the peak is that of the metric on the largest validation batch where that is higher.
        """
        return dataclasses.asdict(self._observed(evaluated))

    def _observed(self, evaluated: bool) -> Observation:
        assert self.session is not None
        last = self._largest_batch() or [next(self._stream)]
        # One for each step, as a step may write into its batch.
        seen = observe(self.session, [next(self._stream) for _ in range(1 + COUNTED_STEPS)] + last)
        counted = len(self._faults) - 1
        if counted > COUNTED_STEPS:  # in some processes most steps take no memory anew, and a few take much
            seen = dataclasses.replace(seen, page_faults=(self._faults[-1] - self._faults[0]) / counted)
        if self._share_read < 1.0:
            seen = dataclasses.replace(seen, notes=seen.notes | {"share_read": self._share_read})
        seen = dataclasses.replace(seen, peak_bytes=int(self.ranks.largest(seen.peak_bytes)[0]))
        if evaluated and self.job.metric is not None:
            seen = dataclasses.replace(seen, peak_bytes=max(seen.peak_bytes, self._evaluation_peak()))
        return seen

    def _largest_batch(self) -> list[Any]:
        """This rank's share of the largest batch, where batches differ."""
        if self._largest is None:
            rank, num = self.ranks.rank, self.ranks.world_size
            with Streams(derive(0, "largest")):
                found = largest_batch(readable(call(self.job, "data"), self.job), LOOKING_SECONDS)
            everywhere = all(self.ranks.gather(bool(found)))
            self._largest = [Again(share_of(batch, rank, num)) for batch in found if everywhere]
        return [again() for again in self._largest]

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
        session, evaluation = self.session, Evaluation(one, self.session, 0)

        def evaluated() -> None:
            with session.whole(), contextlib.suppress(JobError):
                found.append(evaluation.metric())

        found = list[float]()
        peak = live_bytes(session, None) + peak_of(evaluated, session.build.device)
        return peak if found else 0

    @_together("the proof that the plan acts")
    def confirm(self, reference: dict[str, Any], evaluated: bool = False) -> dict[str, Any]:
        """Let every technique of the plan prove that it acted. Raises Refused with the technique's name.

        ``effect`` is a digest of what the step did: equal for settings that make no difference.
        """
        assert self.session is not None
        seen = self._observed(evaluated)
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

    def _steps(self, count: int, given: Again | None = None) -> int:
        """Take steps by the code of `train`, on the loader's batches or the one `given`; the samples, of all
        ranks.
        """
        assert self.session is not None
        assert self._strides is not None
        strides, before = self._strides, self._strides.samples
        for _ in range(count):
            strides.fetches()
            begin = time.perf_counter()
            batch = next(self._stream) if given is None else given()
            self._waited += time.perf_counter() - begin
            strides.stride(batch)
            strides.glance()
        if self.session.build.device.type == "cuda":
            torch.cuda.synchronize()
        return (strides.samples - before) * self.ranks.world_size

    def _signature(self, session: Session, batch: Batch, num_ranks: int) -> str:
        shapes = [
            (n, tuple(p.shape), str(p.dtype)) for m in session.build.models for n, p in m.named_parameters()
        ]
        inputs = [(tuple(t.shape), str(t.dtype)) for t in tensors(batch)]
        optimizers = [
            (type(optimizer).__name__, sorted(f"{k}={v}" for k, v in optimizer.defaults.items()))
            for optimizer in session.optimizers
        ]
        ranks = (num_ranks,) if num_ranks > 1 else ()
        text = repr((shapes, inputs, optimizers, *ranks))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def _trained(session: Session) -> Iterator[torch.Tensor]:
    """What the steps of a session change: weights, buffers and the optimizer's state."""
    for model in session.build.models:
        yield from itertools.chain(model.parameters(), model.buffers())
    for optimizer in session.optimizers:
        yield from tensors([dict(state) for state in optimizer.state.values()])


def _noted(loader: Iterable[Batch], arrived: list[float]) -> Iterator[Batch]:
    """The batches of a loader; it is noted when each arrives."""
    for batch in loader:
        arrived.append(time.perf_counter())
        yield batch
