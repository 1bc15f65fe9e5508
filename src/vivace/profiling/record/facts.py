"""Facts of a running loop that are read, not timed: loader, optimizer, flags, memory, graphs, ranks."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.metadata
import itertools
import mmap
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from traceback import FrameSummary
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, IterableDataset

from vivace.inspection.limits import peak_memory, usable_cores
from vivace.profiling.record import gpus
from vivace.profiling.record.guard import T, reading
from vivace.profiling.record.hooks import LoopHooks
from vivace.profiling.record.sites import TORCH
from vivace.tensors.loaders import hears_epochs, known_length
from vivace.tensors.trees import bytes_of, tensors
from vivace.torch_internals import compiler
from vivace.torch_internals.tensors import dense_parts, storage_id

_HERE = os.path.join(os.path.dirname(__file__), "")
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096

TOUCHED_BYTES = 32 * 2**20
MOST_ITEMS = 10**6  # of a list or a dictionary that is looked through
PYTHON_BLOCK_BYTES = 64  # of an object below 512 bytes, roughly


def describe(hooks: LoopHooks, note: Callable[[Exception], None]) -> dict[str, Any]:
    """All facts of the loop, the process and the machine that the judge reads, as one document.

    One that cannot be read is told to `note`, and stands as if there were nothing of its kind.
    """
    found = reading(lambda: list(parameters(hooks)), list[torch.Tensor](), note)
    device = found[0].device if found else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    optimizers = list(hooks.optimizers.values())
    feeds = hooks.clock.loop_fetches and hooks.loader is not None  # and does not serve validation alone
    looks: dict[str, tuple[Callable[[], Any], Any]] = {
        "device_name": (lambda: _name(device), device.type),
        "torch": (lambda: importlib.metadata.version("torch"), torch.__version__),  # as `Machine.versions`
        "loader": (lambda: _loader(hooks) if feeds else None, None),
        "optimizers": (lambda: [type(optimizer).__name__ for optimizer in optimizers], []),
        "settings": (lambda: [_settings(optimizer) for optimizer in optimizers], []),
        "num_parameters": (lambda: sum(p.numel() for p in found), 0),
        "parameter_bytes": (lambda: bytes_of(found), 0),
        "frozen_bytes": (lambda: bytes_of(frozen(found)), 0),
        "parameter_dtypes": (lambda: sorted({str(p.dtype).removeprefix("torch.") for p in found}), []),
        "optimizer_bytes": (lambda: bytes_of(t for o in optimizers for t in _state(o)), 0),
        "batch_bytes": (lambda: bytes_of(tensors(hooks.batch)), 0),
        "flags": (_flags, {}),
        "ranks": (lambda: _ranks(hooks), {}),
        "cuda": (lambda: _cuda(device) if device.type == "cuda" else {}, {}),
    }
    read = {name: reading(look, otherwise, note) for name, (look, otherwise) in looks.items()}
    return {"device": device.type, **read}


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def parameters(hooks: LoopHooks) -> Iterator[torch.Tensor]:
    """The parameters of all optimizers that stepped, or those updated by hand, each once."""
    groups = [group["params"] for o in hooks.optimizers.values() for group in o.param_groups]
    every = itertools.chain.from_iterable(groups or [hooks.by_hand])
    yield from {id(parameter): parameter for parameter in every}.values()


def frozen(trained: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Weights and buffers of the models that train which no optimizer updates, each once."""
    gc.collect()
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
    inner = {id(child) for module in modules for child in _all_of(module.children)}
    ids = set(map(id, trained))
    found: dict[int, torch.Tensor] = {}
    for module in modules:
        if id(module) in inner:
            continue
        every = itertools.chain(_all_of(module.parameters), _all_of(module.buffers))
        parts = {id(t): t for t in every if not is_lazy(t)}
        if not ids.isdisjoint(parts):
            found.update(parts)
    return [tensor for key, tensor in found.items() if key not in ids]


def _all_of(part: Callable[[], Iterable[T]]) -> list[T]:
    """All of a module's parameters or the like; nothing where its construction has failed."""
    return _quietly(lambda: list(part()), [])


def _quietly(look: Callable[[], T], otherwise: T) -> T:
    """What a thing of the script's answers; `otherwise` where it raises, which is its own affair."""
    return reading(look, otherwise, lambda error: None)


def held_bytes(hooks: LoopHooks) -> int:
    """Bytes of the distinct storages alive between two steps: weights, gradients, optimizer state, batch."""
    storages: dict[int, int] = {}
    found = list(parameters(hooks))
    grads = [p.grad for p in found if p.grad is not None]
    state = [t for optimizer in hooks.optimizers.values() for t in _state(optimizer)]
    held = [*found, *frozen(found), *grads, *state, *tensors(hooks.batch)]
    for part in itertools.chain.from_iterable(map(dense_parts, held)):
        storage = part.untyped_storage()
        storages[storage_id(storage)] = storage.nbytes()
    return sum(storages.values())


def resident_bytes() -> int:
    """Resident memory of this process; on GPUs, the bytes that torch's allocator gave out."""
    if numbers := gpus.used():
        return sum(map(torch.cuda.memory_allocated, numbers))
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    return 0


def allocated_bytes() -> int | None:
    """Bytes of this process's memory that somebody holds: what the C library gave out, and Python's objects.

    Resident memory also counts what was freed in pieces that nobody can use at the moment. None where the C
    library does not say (it is not glibc 2.33 or later, or another allocator stands before it), and on a GPU,
    where `resident_bytes` says it.
    """
    if gpus.used():
        return None
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2") or "malloc" in os.environ.get("LD_PRELOAD", ""):
        return None
    library.mallinfo2.restype = _Mallinfo
    found = library.mallinfo2()
    return int(found.uordblks + found.hblkhd) + PYTHON_BLOCK_BYTES * sys.getallocatedblocks()


class _Mallinfo(ctypes.Structure):
    """What glibc's mallinfo2 returns: bytes and blocks by how they were allocated."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
            "keepcost",
        )
    ]  # fmt: skip


def peak_bytes() -> int:
    """The most that `resident_bytes` was so far."""
    if numbers := gpus.used():
        return sum(map(torch.cuda.max_memory_allocated, numbers))
    return peak_memory()


def allocator_retries() -> int:
    """How often torch's allocator ran out of memory on a GPU so far, gave back what it kept, and went on."""
    return sum(int(torch.cuda.memory_stats(n).get("num_alloc_retries", 0)) for n in gpus.used())


def first_touch() -> float:
    """Bytes/s at which the system hands out memory that was not used before."""
    with mmap.mmap(-1, TOUCHED_BYTES) as fresh:
        begin = time.perf_counter()
        for place in range(0, TOUCHED_BYTES, _PAGE):
            fresh[place] = 1
        return TOUCHED_BYTES / (time.perf_counter() - begin)


def live_graph_tensors() -> tuple[int, dict[str, int]]:
    """How many tensors with a history are alive between two steps, and how many each variable of the loop
    and each attribute of its objects holds, by name and file: in a list, or one on the other.
    """
    gc.collect()
    alive = [t for t in gc.get_objects() if _has_history(t)]
    holders: dict[str, int] = {}
    if alive:
        for name, value in _names(sys._getframe(1)):
            if _has_history(value):
                holders[name] = _chain(value)
            if issubclass(type(value), (list, dict)):
                holders[name] = sum(map(_has_history, _items(value)))
    chain = max((_chain(t) for t in alive[:50]), default=0)
    return len(alive) + chain, holders


def _items(held: list[Any] | dict[Any, Any]) -> list[Any]:
    """What a list or a dictionary holds, unless that is very much. Where it is of a kind of the script's own,
    none of its code runs: that may import, load or raise.
    """
    if isinstance(held, dict):
        return list(dict.values(held)) if dict.__len__(held) < MOST_ITEMS else []
    return list(list.__iter__(held)) if list.__len__(held) < MOST_ITEMS else []


def _attributes(thing: object) -> dict[str, Any]:
    """By name; none where it has none, or stands for another object that cannot be asked."""
    if not type(thing).__dictoffset__:  # most have none, and an error for each takes long
        return {}
    found = _quietly(lambda: object.__getattribute__(thing, "__dict__"), None)
    return dict(found) if type(found) is dict else {}


def _names(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """Variables of a frame and its callers, and attributes of the objects in them: ``name (file)``, value."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_HERE):
            for scope in (frame.f_locals, frame.f_globals):
                for name, value in list(scope.items()):
                    if name.startswith("__"):
                        continue
                    yield f"{name} ({file})", value
                    if not issubclass(type(value), (type, ModuleType, torch.Tensor)):
                        for inner, held in _attributes(value).items():
                            yield f"{name}.{inner} ({file})", held
        frame = frame.f_back


def page_faults() -> tuple[int, int]:
    """Page faults of this process so far: those served from memory, and those from disk."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt, usage.ru_majflt


def num_graphs() -> int:
    """Graphs that torch.compile has made in this process."""
    utils = compiler.counts()
    return int(utils.counters["stats"]["unique_graphs"]) if utils else 0


def compiles() -> bool:
    """Has torch.compile been at work in this process, with or without success?"""
    utils = compiler.counts()
    return bool(utils and (num_graphs() or utils.counters["graph_break"] or utils.get_compilation_metrics()))


def dynamo() -> dict[str, Any]:
    """Counters of torch.compile; empty where it was not used."""
    utils = compiler.counts()
    if utils is None or not compiles():
        return {}
    rows, metrics = [], utils.get_compilation_metrics()
    for metric in metrics:
        seconds = getattr(metric, "entire_frame_compile_time_s", None) or 0.0
        reason = getattr(metric, "recompile_reason", None)
        place = f"{metric.co_filename}:{metric.co_firstlineno} {metric.co_name}"
        rows.append({"place": place, "seconds": seconds, "reason": reason, "failed": metric.fail_reason})
    breaks = [[str(reason)[:600], int(n)] for reason, n in utils.counters["graph_break"].items()]
    places = Counter(_own_line(reason.user_stack) for reason in utils.graph_break_reasons)
    return {
        "graphs": num_graphs(),
        "compilations": rows,
        "metrics": metrics,  # of which the rows are
        "most": utils.DEFAULT_COMPILATION_METRICS_LIMIT,  # torch keeps the last ones only
        "breaks": breaks,
        "break_places": dict(places),
    }


def _own_line(stack: Sequence[FrameSummary]) -> str:
    """``file:line`` of the innermost frame outside of installed packages; else of the innermost."""
    own = [row for row in stack if "site-packages" not in row.filename and not row.filename.startswith(TORCH)]
    return next((f"{row.filename}:{row.lineno}" for row in reversed(own or stack)), "")


def dynamo_difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What torch.compile did in the timed window, with all graph breaks since the start.

    Where torch has kept only the last of many compilations, ``cut`` says how many those are.
    """
    if not after:
        return {}
    old = set(map(id, before.get("metrics", [])))
    rows = zip(after["compilations"], after["metrics"], strict=True)
    return {
        "graphs": after["graphs"],
        "new_graphs": after["graphs"] - before.get("graphs", 0),
        "breaks": after["breaks"],
        "break_places": after["break_places"],
        "compilations": [row for row, metric in rows if id(metric) not in old],
        "cut": after["most"] if len(after["metrics"]) >= after["most"] else None,
        "reasons": [row for row in after["compilations"] if row["reason"]],
        "failed": [row for row in after["compilations"] if row["failed"]],
    }


def _has_history(thing: torch.Tensor) -> bool:
    if type(thing) is not torch.Tensor:
        return False
    try:
        return thing.grad_fn is not None
    except RuntimeError:  # one of several views whose base was changed in place: nobody can use it any more
        return False


def _chain(tensor: torch.Tensor) -> int:
    """How many backward nodes hang below a tensor along the first input, at most 100,000."""
    node, depth = tensor.grad_fn, 0
    while node is not None and depth < 100_000:
        following = [n for n, _ in node.next_functions if n is not None]
        node, depth = (following[0] if following else None), depth + 1
    return depth


def _loader(hooks: LoopHooks) -> dict[str, Any]:
    """Of the loader that feeds training; of several that do so together, the shortest ends the pass."""
    loader: DataLoader[Any] = hooks.loader
    dataset: Any = loader.dataset
    sampler = getattr(loader, "sampler", None)
    lengths = [length for one in hooks.loaders or [loader] if (length := _length(one)) is not None]
    return {
        "num_workers": loader.num_workers,
        "batch_size": loader.batch_size,
        "pin_memory": bool(loader.pin_memory),
        "persistent_workers": bool(loader.persistent_workers),
        "prefetch_factor": loader.prefetch_factor,
        "dataset": type(dataset).__name__,
        "dataset_length": _length(dataset),
        "stream": isinstance(dataset, IterableDataset),
        "hears_epochs": _quietly(lambda: hears_epochs(dataset), False),
        "sampler": type(sampler).__name__,
        "batches": min(lengths, default=None),
    }


def _length(data: Any) -> int | None:
    """None also where asking fails, as it may before the first sample is read."""
    return _quietly(lambda: known_length(data), None)


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    names = ("fused", "foreach", "capturable", "lr", "momentum")
    settings = {name: value for name in names if (value := optimizer.defaults.get(name)) is not None}
    groups = [group["params"] for group in optimizer.param_groups]
    return {**settings, "groups": len(groups), "tensors": sum(map(len, groups))}


def _flags() -> dict[str, Any]:
    backends: Any = torch.backends
    return {
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "cores": usable_cores(),
        "tf32": [
            name
            for name, owner in (("matmul", backends.cuda.matmul), ("convolution", backends.cudnn.conv))
            if torch.cuda.is_available() and owner.fp32_precision == "tf32"
        ],
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn_benchmark": backends.cudnn.benchmark,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn_deterministic": backends.cudnn.deterministic,
        "anomaly": torch.is_anomaly_enabled(),
        "compiled": compiler.is_imported(),
        "environment": {
            key: os.environ[key] for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if key in os.environ
        },
    }


def _ranks(hooks: LoopHooks) -> dict[str, Any]:
    if not (distributed.is_available() and distributed.is_initialized()):
        return {"world_size": 1, "rank": 0}
    loader = hooks.loader
    sampler = type(getattr(loader, "sampler", None)).__name__
    batch = [t for t in tensors(hooks.batch) if t.numel()]
    return {
        "world_size": distributed.get_world_size(),
        "rank": distributed.get_rank(),
        "backend": distributed.get_backend(),
        "sampler": sampler,
        # Of all tensors: the first may be a mask, or padding, which is the same everywhere.
        "batch_sum": sum(map(_sum, batch)) if batch else None,
    }


def _sum(tensor: torch.Tensor) -> float:
    return float((tensor.abs() if tensor.is_complex() else tensor).double().sum())


def _cuda(device: torch.device) -> dict[str, Any]:
    stats = torch.cuda.memory_stats(device)
    return {
        "peak_allocated": torch.cuda.max_memory_allocated(device),
        "peak_reserved": torch.cuda.max_memory_reserved(device),
        "inactive_split_peak": stats.get("inactive_split_bytes.all.peak", 0),
        "total": torch.cuda.get_device_properties(device).total_memory,
    }


def _state(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        yield from tensors(dict(state) if hasattr(state, "items") else state)
