"""What a step really does: the operators, dtypes, bytes and page faults of one profiled step of a session."""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity

from vivace.job import Batch
from vivace.ledger import Observation
from vivace.operators import MATRIX_CLASSES, class_of, is_operator
from vivace.session.session import Session
from vivace.tensors.trees import Again, tensors
from vivace.torch_internals import compiler
from vivace.torch_internals.tensors import dense_parts, raw_events

COUNTED_STEPS = 2

DTYPES = {
    "double": "float64",
    "float": "float32",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    "c10::Float8_e4m3fn": "float8_e4m3fn",
    "c10::Float8_e5m2": "float8_e5m2",
}


def observe(session: Session, batches: list[Any]) -> Observation:
    """Run a few steps of `session`, the last one profiled, and return what that step did.

    `batches` are reused in turn, as they were; draw them with ``session.batches``, so that data techniques
    have acted. The weights move on. Steps before the profiled one warm up and count page faults: the profiler
    causes some. A replayed graph shows its kernels and no operators: those are then seen in one more step,
    without it.
    """
    again = [Again(batch) for batch in batches]
    session.step(again[0]())
    before = minor_faults()
    for number in range(COUNTED_STEPS):
        session.step(again[(number + 1) % len(batches)]())
    faults = (minor_faults() - before) / COUNTED_STEPS
    batch = again[-1]()
    held = live_bytes(session, batch)
    profiler = profile_step(session, batch)
    events = raw_events(profiler)
    if session.build.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(session.build.device)
        peak += kept_by_graphs(torch.cuda.memory_snapshot())  # type: ignore[no-untyped-call]
    else:
        peak = held + _highest_sum(events)
    if not _matrix_dtypes(events) and not session.build.own_step:
        uncaptured = profile_step(session, again[-1](), _without_graphs)
        events = [*events, *raw_events(uncaptured)]
    compiled_graphs, graph_breaks = _dynamo_counters()
    return Observation(
        operators=dict(Counter(e.name() for e in events if is_operator(e.name()))),
        dtypes=_matrix_dtypes(events),
        peak_bytes=peak,
        page_faults=faults,
        compiled_graphs=compiled_graphs,
        graph_breaks=graph_breaks,
        kernels=dict(Counter(e.name() for e in events if _is_kernel(e))),
        notes=dict(session.build.notes),
        facts=session.build.facts.to_dict(),
    )


def now(device: torch.device) -> float:
    """Seconds on the clock, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def profile_step(
    session: Session, batch: Batch, step: Callable[[Session, Any], Any] = Session.step
) -> torch.profiler.profile:
    """One step under torch's profiler; asks for GPU activity only where the session runs on a GPU."""
    device = session.build.device
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    with torch.profiler.profile(
        activities=activities, record_shapes=True, profile_memory=True, acc_events=True
    ) as profiler:
        assert isinstance(profiler, torch.profiler.profile)
        step(session, batch)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return profiler


def peak_of(function: Callable[[], Any], device: torch.device) -> int:
    """Bytes that a function holds at most while it runs, beyond those that it finds."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        function()
    return _highest_sum(raw_events(profiler))


def _without_graphs(session: Session, batch: Batch) -> None:
    """A step of which no part is replayed: neither the whole, nor what the compiler captured."""
    with torch.compiler.set_stance("force_eager") if compiler.is_imported() else nullcontext():
        session.plain_step(batch)


def kept_by_graphs(segments: Iterable[dict[str, Any]]) -> int:
    """Bytes that captured graphs keep from everything else and that no tensor holds at the moment.

    `segments`: ``torch.cuda.memory_snapshot()``. A graph's memory lies in a pool of its own, whose id is not
    (0, 0); between replays it counts as free there, and nobody else can have it.
    """
    private = [s for s in segments if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0)]
    return sum(s["total_size"] - s["allocated_size"] for s in private)


def live_bytes(session: Session, batch: Batch) -> int:
    """Bytes of the distinct storages that a step finds: weights, buffers, optimizer state, and the batch; of
    weights that ranks divide, this rank's part. DistributedDataParallel keeps the buckets of all gradients.
    """
    storages, shards = {}, session.build.shards
    for tensor in _held_tensors(session, batch):
        for part in dense_parts(tensor if shards is None else shards.local(tensor)):
            storage = part.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    wrapped: list[nn.Parameter] = [
        weight for parallel in session.build.parallel for weight in parallel.parameters()
    ]
    buckets = [weight for weight in wrapped if weight.requires_grad and weight.grad is None]
    return sum(storages.values()) + sum(weight.nbytes for weight in buckets)


def _held_tensors(session: Session, batch: Batch) -> Iterable[torch.Tensor]:
    for model in session.build.models:
        yield from _of_module(model)
    for optimizer in session.optimizers:
        yield from tensors([dict(state) for state in optimizer.state.values()])
    for stateful in session.build.kept.values():
        yield from tensors(stateful.state_dict())
    yield from tensors(batch)


def _of_module(model: nn.Module) -> Iterator[torch.Tensor]:
    for parameter in model.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from model.buffers()


def _highest_sum(events: list[Any]) -> int:
    """The largest running sum of the bytes that a step allocates and frees, in the order of time."""
    moves = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    total = highest = 0
    for _, move in moves:
        total += move
        highest = max(highest, total)
    return highest


def _matrix_dtypes(events: list[Any]) -> dict[str, int]:
    """Floating-point inputs by dtype of the innermost matrix operators, with no other inside."""
    matrix = [e for e in events if is_operator(e.name()) and class_of(e.name()) in MATRIX_CLASSES]
    matrix.sort(key=lambda e: (e.start_thread_id(), e.start_ns(), -e.end_ns()))
    counts: Counter[str] = Counter()
    for number, event in enumerate(matrix):
        following = matrix[number + 1] if number + 1 < len(matrix) else event
        same_thread = following is not event and following.start_thread_id() == event.start_thread_id()
        if not (same_thread and following.start_ns() < event.end_ns()):
            counts.update(DTYPES[dtype] for dtype in event.dtypes() if dtype in DTYPES)
    return dict(counts)


def _is_kernel(event: Any) -> bool:
    return "CUDA" in str(event.device_type()) and event.name() != "[memory]"


def minor_faults() -> int:
    """How often the system has given this process memory so far, a page at a time."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _dynamo_counters() -> tuple[int, int]:
    """Graphs compiled and graph breaks of this process; nothing is imported to find out."""
    dynamo = compiler.counts()
    if dynamo is None:
        return 0, 0
    counters = dynamo.counters
    return int(counters["stats"]["unique_graphs"]), sum(counters["graph_break"].values())
