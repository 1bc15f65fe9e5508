"""Profile of a reference session: where a step's time goes, by part and operator class; facts of the job."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from importlib.util import find_spec
from typing import Any, cast

import psutil
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from vivace.inspection.limits import usable_cores
from vivace.job import Batch, Job
from vivace.ledger import Profile
from vivace.mechanisms.decoding import DecodingSeen
from vivace.observing.observe import minor_faults, now, observe, profile_step
from vivace.operators import (
    LEAST_DROPPED_FLOAT,
    LEAST_MASK,
    LEAST_ONE_BY_ONE,
    LEAST_SCORES,
    MOST_KEYS,
    ONE_BY_ONE,
    SMALL_MAP,
    class_of,
    gains_by_winograd,
    seconds_by_class,
)
from vivace.session.opening import call, endless_batches
from vivace.session.session import Session
from vivace.tensors.denormals import Denormals
from vivace.tensors.loaders import known_length, notices
from vivace.tensors.modules import kinds_of, modules_of
from vivace.tensors.trees import Again, batch_size, bytes_of
from vivace.torch_internals.tensors import Operator

TIMED_STEPS, MOST_TIMED_STEPS = 5, 32
ONE_BY_ONE_DTYPES = (torch.float32, torch.bfloat16, torch.float64)  # for which there is something faster
PARTS = ("data", "place", "forward", "backward", "update")


def profile_reference(session: Session, job: Job, batches: list[Any], num_ranks: int = 1) -> Profile:
    """Profile an open session of `job` under the empty plan; `batches` are some of its batches.

    Where it is one of `num_ranks` that are to train together, `batches` are its shares of some.

    The parts are timed on the job's own loader, fetch and step in turn, so that workers overlap.
    """
    loader = call(job, "data")
    workers = getattr(loader, "num_workers", 0)
    steps = max(TIMED_STEPS, min(2 * workers, MOST_TIMED_STEPS))
    parts, faults = _time_parts(session, endless_batches(session, job, loader, world_size=num_ranks), steps)
    last = Again(batches[-1])
    seen = observe(session, batches)
    step_seconds = sum(parts.values())
    parameters = [p for model in session.build.models for p in model.parameters()]
    return Profile(
        device=session.build.device.type,
        step_seconds=step_seconds,
        shares={part: parts[part] / step_seconds for part in PARTS},
        operator_shares=operator_shares(profile_step(session, last())),
        num_operators=sum(seen.operators.values()),
        page_faults=faults,  # not of the few steps of `observe`: many a step takes no memory anew
        parameter_bytes=bytes_of(parameters),
        peak_bytes=seen.peak_bytes,
        features={
            **_features(session, batches[0], loader, parameters),
            "epochs": job.epochs,
            **_what_runs(session, last()),
            "loading_limit": _loading_limit(parts, batch_size(batches[0]), loader),
        },
    )


def _time_parts(session: Session, source: Iterator[Any], num_steps: int) -> tuple[dict[str, float], float]:
    """Seconds of each part of a step, after one more that warms up: the median, of fetching the mean; and the
    mean of its page faults.

    Workers hand their batches over in turn, so of several steps one waits for all.
    """
    spent: dict[str, float] = defaultdict(float)
    steps: list[dict[str, float]] = []
    faults: list[int] = []
    with _timed(session, spent):
        for _ in range(num_steps + 1):
            spent.clear()
            start = now(session.build.device)
            batch = next(source)
            fetched, before = now(session.build.device), minor_faults()
            session.step(batch)
            done = now(session.build.device)
            faults.append(minor_faults() - before)
            rest = done - fetched - sum(spent.values())
            last = "forward" if session.build.own_step else "update"
            steps.append({**spent, "data": fetched - start, last: rest})
    middle = {"data": statistics.fmean}
    parts = {
        part: middle.get(part, statistics.median)([step.get(part, 0.0) for step in steps[1:]])
        for part in PARTS
    }
    return parts, statistics.fmean(faults[1:])


def _timed(session: Session, spent: dict[str, float]) -> AbstractContextManager[None]:
    """Add the seconds of placing, forward and backward to `spent`."""
    device = session.build.device

    def timed(name: str, following: Callable[..., Any], *arguments: object) -> Any:
        start = now(device)
        result = following(*arguments)
        spent[name] += now(device) - start
        return result

    return session.seams.observed(**{name: partial(timed, name) for name in ("place", "forward", "backward")})


class Kernels(Denormals):  # type: ignore[no-untyped-call]
    """Notes operators that a compiler makes kernels of, with the shapes they run on, and convolutions too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, tuple[torch.Size, ...]]] = set()
        self.convolutions = self.small = 0  # multiplications, and those with 1x1 windows or on small maps
        self.slow_depthwise = False
        self.winograd = 0  # of the convolutions' multiplications
        self.mask_numbers = self.one_by_one = 0
        self.layers_of_library = self.slow_attention = False
        self.attention_scores = 0

    def run_operator(self, function: Operator, arguments: Any, keywords: Any) -> Any:
        """Run it, as the mode around this one would."""
        name = function.overloadpacket.__name__
        if class_of(name) in ("elementwise", "norm"):
            self.seen.add((name, tuple(one.shape for one in arguments if isinstance(one, torch.Tensor))))
        found = super().run_operator(function, arguments, keywords)
        if function is torch.ops.aten.bernoulli_.float and found.numel() >= LEAST_MASK:
            self.mask_numbers += found.numel()
        self.one_by_one += numbers_one_by_one(name, arguments)
        self.layers_of_library |= name == "mkldnn_rnn_layer"
        self._attends(name, arguments, found)
        if name == "convolution" and found.dim() == 4:
            weight, stride, dilation, transposed, groups = (arguments[n] for n in (1, 3, 5, 6, 8))
            number = found.numel() * weight[0].numel()
            plain = weight.shape[2:] == (1, 1) or found[0, 0].numel() <= SMALL_MAP
            self.convolutions += number
            self.small += number if groups == 1 and plain else 0
            once = max(*stride, *dilation, groups) == 1 and not transposed and found.dtype == torch.float32
            self.winograd += number if once and gains_by_winograd(weight.shape, found.shape) else 0
            usual = max(weight.shape[2:]) <= 3 and max(*stride, *dilation) == 1
            depthwise = not transposed and 1 < groups == len(weight) == arguments[0].shape[1]
            self.slow_depthwise = self.slow_depthwise or (depthwise and not usual)
        return found

    def _attends(self, name: str, arguments: Sequence[Any], found: Any) -> None:
        """Count scores of attention: of PyTorch's kernel for CPUs, or written out, as where it drops some."""
        if name == "_safe_softmax":
            self.attention_scores += found.numel()
            self.slow_attention |= found.numel() >= LEAST_DROPPED_FLOAT and found.shape[-1] <= MOST_KEYS
        elif name == "_scaled_dot_product_flash_attention_for_cpu":
            query, key = arguments[:2]
            scores, keys = query.shape[:-1].numel() * key.shape[-2], key.shape[-2]
            self.attention_scores += scores
            half = query.dtype == torch.bfloat16
            self.slow_attention |= half and scores >= LEAST_SCORES and keys <= MOST_KEYS


def numbers_one_by_one(name: str, arguments: Sequence[Any]) -> int:
    """How many numbers an operator is given that a CPU computes one by one; of few, none."""
    given = [one for one in arguments if isinstance(one, torch.Tensor)]
    if name not in ONE_BY_ONE:
        return 0
    if name.startswith(("index", "_index")):  # of what is added, not of what it is added to
        indices = [one for one in arguments[1] if one is not None]
        adds = True in arguments[3:4] and [one.dtype for one in indices] == [torch.int64]
        given = given[1:] if adds else []
    given = [one for one in given if one.dtype in ONE_BY_ONE_DTYPES]
    if name.startswith("max_pool"):  # in this order it is computed in vectors
        given = [one for one in given if not one.is_contiguous(memory_format=torch.channels_last)]
    largest = max((one.numel() for one in given), default=0)
    return largest if largest >= LEAST_ONE_BY_ONE else 0


def _what_runs(session: Session, batch: Batch) -> dict[str, Any]:
    """Of a forward and backward pass: how many operators differ in name or shapes, but products; of the 2-D
    convolutions, which share of their multiplications has 1x1 windows or small maps, which suits Winograd's
    filtering, and whether any is depthwise and not a plain 3x3; whether recurrent layers run step by step;
    how many numbers large masks have, and what is computed one by one; how many scores attention has, and
    whether it is of a kind that is slow here; and the share of denormal numbers.
    """
    kernels = Kernels()

    def counted(following: Callable[..., Any], *arguments: object) -> Any:
        with kernels:
            return following(*arguments)

    seams = ("step",) if session.build.own_step else ("forward", "backward")
    with session.seams.observed(**dict.fromkeys(seams, counted)):
        session.step(batch)
    multiplications = max(1, kernels.convolutions)
    layers = [layer for model in session.build.models for layer in modules_of(model, nn.GRU, nn.LSTM, nn.RNN)]
    return {
        "stepwise_recurrent": not all(
            kernels.layers_of_library and isinstance(one, nn.LSTM) for one in layers
        ),
        "distinct_operators": len(kernels.seen),
        "small_convolutions": kernels.small / multiplications,
        "winograd_convolutions": kernels.winograd / multiplications,
        "slow_depthwise": kernels.slow_depthwise,
        "mask_numbers": kernels.mask_numbers,
        "one_by_one": kernels.one_by_one,
        "attention_scores": kernels.attention_scores,
        "slow_attention": kernels.slow_attention,
        "denormals": kernels.share,
    }


def operator_shares(profiler: torch.profiler.profile) -> dict[str, float]:
    """Fractions of the operators' own time: the device's where kernels ran, else the CPU's."""
    rows = [row for row in profiler.key_averages() if "CPU" in str(row.device_type)]
    on_device = any(row.self_device_time_total for row in rows)
    own = [(row.key, row.self_device_time_total if on_device else row.self_cpu_time_total) for row in rows]
    seconds = seconds_by_class(own, on_device=on_device)
    total = sum(seconds.values()) or 1.0
    return {kind: value / total for kind, value in seconds.items()}


def _features(
    session: Session, batch: Batch, loader: Iterable[Batch], parameters: list[torch.nn.Parameter]
) -> dict[str, Any]:
    optimizers = [type(optimizer).__name__ for optimizer in session.optimizers]
    return {
        **kinds_of(session.build.models),
        "batch_size": batch_size(batch),
        "dtype": str(parameters[0].dtype).removeprefix("torch.") if parameters else None,
        "optimizer": optimizers[0] if optimizers else None,
        "num_parameters": sum(p.numel() for p in parameters),
        "num_threads": torch.get_num_threads(),
        "own_step": session.build.own_step,
        "loader": _loader_facts(loader),
    }


def _loading_limit(parts: dict[str, float], samples: int, loader: Iterable[Batch]) -> str:
    """Can this host's cores feed the step? Empty where loading costs little, or workers hide what it does."""
    rest = sum(parts.values()) - parts["data"]
    if not isinstance(loader, DataLoader) or loader.num_workers or parts["data"] < 0.05 * rest:
        return ""
    one, wanted, cores = samples / parts["data"], samples / rest, usable_cores()
    if one * cores < wanted:
        return (
            f"{in_cores(cores)} can load {one * cores:,.0f} samples a second, the step consumes "
            f"{wanted:,.0f}: no number of workers can feed it; less work for each sample can"
        )
    number = math.ceil(wanted / one)
    feed = f"{in_cores(number)} feed{'s' if number == 1 else ''} it"
    return f"a core loads {one:,.0f} samples a second, the step consumes {wanted:,.0f}: {feed}"


def in_cores(number: int) -> str:
    """A number of cores in words: ``one core``, ``2 cores``."""
    return "one core" if number == 1 else f"{number} cores"


def _loader_facts(loader: Iterable[Batch]) -> dict[str, Any]:
    if not isinstance(loader, DataLoader):
        return {"is_dataloader": False, "decodes_jpeg": _decodes_jpeg(loader)}
    dataset = loader.dataset
    return {
        "is_dataloader": True,
        "is_iterable": isinstance(dataset, IterableDataset),
        "num_workers": loader.num_workers,
        "batch_size": loader.batch_size,
        "dataset_length": known_length(dataset),
        "in_memory": isinstance(getattr(dataset, "dataset", dataset), TensorDataset | list),
        "decodes_jpeg": _decodes_jpeg(dataset),
    }


def _decodes_jpeg(data: Iterable[Any] | Dataset[Any]) -> bool:
    """Does a sample of a dataset, or a batch of another source, decode a JPEG with Pillow? True where none
    can be asked for, or a process that was started to read it may do so.
    """
    if find_spec("PIL") is None:
        return False
    indexed = isinstance(data, Dataset) and not isinstance(data, IterableDataset)
    before = set(psutil.Process().children())
    with DecodingSeen() as seen:
        found = notices(cast("Dataset[Any]", data) if indexed else _First(data), lambda: seen.count)
    return found or not before.issuperset(psutil.Process().children())


class _First(Dataset[Any]):
    """What comes first of data that have no index, whatever number is asked for."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __getitem__(self, index: int) -> Any:
        return next(iter(self.data))
