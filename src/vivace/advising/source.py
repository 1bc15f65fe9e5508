"""What to advise on: a saved profile, a job counted in a child process, or a model that is already
counted."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vivace.advising.demand import Demand, load_models
from vivace.errors import InputError, JobError, VivaceError, nearest

FORMAT = 1
COUNTING_SECONDS = 600
PRECISIONS = {
    "float64": "fp64",
    "fp64": "fp64",
    "float32": "fp32",
    "fp32": "fp32",
    "tf32": "tf32",
    "amp": "amp",
    "float16": "amp",
    "fp16": "amp",
    "bfloat16": "amp",
    "bf16": "amp",
}
ITEM_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "amp": 2, "fp16": 2, "bf16": 2}
WEIGHT_BYTES = {"fp64": 8, "fp16": 2, "bf16": 2}  # of a weight and its gradient; 4 in every other precision
MOST_OF_HALF = 3  # bytes a weight: more than 2, since norms are often left in fp32
NEEDED = ("batch_size", "operators", "num_parameters")
FUSED = "fused:"  # of the table's keys: with the fused attention of today's PyTorch
IN_OPERATORS = (
    "attention is counted in single operators, as in the published figures: where one kernel does it, it "
    "takes less time and memory"
)
UNKNOWN_MEMORY = (
    "the memory of its step could not be predicted: what a step holds for a moment is left out, which of a "
    "language model is as much again"
)
ABOVE_0 = ("steps_per_epoch", "epochs", "step_seconds", "batches_at_once")
AMOUNTS = (
    *("optimizer_bytes", "activation_bytes", "frozen_bytes", "host_seconds_per_sample"),
    *("waiting_seconds_per_sample", "communication_seconds", "parameter_bytes", *ABOVE_0),
)


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """What a GPU reserves for a step, as `vivace.memory` predicts it: the most of ``fixed + share * growing``
    over pairs of bytes, for so large a share of the batch. Computing activations again spares `spared_bytes`.
    """

    lines: tuple[tuple[float, float], ...]
    spared_bytes: float

    def at_peak(self, share: float) -> tuple[float, float]:
        """Of this share of the batch what is there whatever the batch, and what grows with it."""
        return max(((fixed, share * growing) for fixed, growing in self.lines), key=sum)


@dataclasses.dataclass(frozen=True)
class Subject:
    """A training job as its work: what a step does, how many steps there are, what it keeps in memory.

    Args:
        name: the job's reference, the profile's file or the counted model.
        demand: the work of one step.
        precision: what it was counted or profiled in: ``fp64``, ``fp32``, ``tf32`` or ``amp``; ``fp16`` or
            ``bf16`` where the weights themselves are such numbers.
        batch_size: samples a step.
        steps_per_epoch, epochs: None where the job does not say.
        optimizer_bytes: state of the optimizer.
        activation_bytes: what the backward pass keeps, at this batch size and precision.
        host_seconds_per_sample: the least time in which the input pipeline gives a sample; None where it was
            not measured.
        device, step_seconds: where it was measured, and how long a step took.
        counted: ``fake``, ``real``, ``profile`` or ``table``.
        waiting_seconds_per_sample: how long the measured step waited for it, with nothing else to do.
        communication_seconds: how long the measured step waited for other ranks.
        channels_last: was it profiled with images in that order?
        frozen_bytes: weights and buffers that do not train.
        batches_at_once: how many ranks it was profiled on, each with a batch of its own in every step.
        waits_for_workers: is the time of the input pipeline that of workers, which all cards of a host share?
        notes: what a person should know of how it was counted.
        step_memory: of a job that was counted, what its step takes as it is, where that can be predicted.
        mixed_memory: and in mixed precision.
    """

    name: str
    demand: Demand
    precision: str
    batch_size: int
    steps_per_epoch: float | None = None
    epochs: float | None = None
    optimizer_bytes: float = 0.0
    activation_bytes: float = 0.0
    host_seconds_per_sample: float | None = None
    device: str | None = None
    step_seconds: float | None = None
    counted: str = "table"
    waiting_seconds_per_sample: float = 0.0
    communication_seconds: float = 0.0
    channels_last: bool = False
    frozen_bytes: float = 0.0
    batches_at_once: float = 1.0
    waits_for_workers: bool = False
    notes: tuple[str, ...] = ()
    step_memory: StepMemory | None = None
    mixed_memory: StepMemory | None = None

    @property
    def samples_a_step(self) -> float:
        """Of all ranks that it was profiled on."""
        return self.batch_size * self.batches_at_once

    @property
    def worked_seconds(self) -> float | None:
        """Of the measured step, what was no waiting for data or other ranks; None where none was measured."""
        waited = self.waiting_seconds_per_sample * self.batch_size + self.communication_seconds
        return None if self.step_seconds is None else self.step_seconds - waited


def open_subject(reference: str) -> Subject:
    """``PROFILE.json`` of ``vivace profile --json``, a counted model's key or name, or a JOB to count.

    Raises InputError for a profile of another format, JobError for a job that cannot be counted.
    """
    if reference.endswith(".json"):
        return _read_profile(Path(reference))
    known = counted_model(reference)
    if known is not None:
        return known
    try:
        return _count(reference)
    except InputError as error:  # also without torch, which counts jobs
        names = (key.partition(":")[2].partition("@")[0] for key in load_models())
        near = "" if re.search(r"[./\\:]", reference) else nearest(reference, names)
        raise type(error)(f"{error}{near}") from None


def counted_model(name: str, batch_size: int = 64) -> Subject | None:
    """A model of the shipped table, by its key or by its name alone, which is that with fused attention where
    the table has it; None where there is none."""
    models = load_models()
    matches = [key for key in models if key == name or key.partition(":")[2].partition("@")[0] == name]
    if not matches or ".py" in name:
        return None
    usual = sorted(matches, key=lambda key: (not key.startswith(FUSED), not key.endswith("@224")))
    key = name if name in models else usual[0]
    demand = models[key]
    return Subject(
        key,
        demand,
        "fp32",
        batch_size,
        optimizer_bytes=8.0 * demand.num_parameters,
        activation_bytes=demand.saved_bytes * batch_size,
        notes=(IN_OPERATORS,) if demand.attends_in_operators else (),
    )


def _read_profile(path: Path) -> Subject:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"the profile '{path}' cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise InputError(f"'{path}' is not JSON; write it with vivace profile JOB --json > {path}") from None
    work = document.get("work") if isinstance(document, dict) else None
    if not isinstance(work, dict):
        raise InputError(
            f"'{path}' holds no work of a step; write it with vivace profile JOB --json > {path}"
        )
    try:
        return _subject(work, str(path), "profile")
    except InputError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, ZeroDivisionError) as error:
        raise InputError(
            f"the work in the profile '{path}' is not as vivace profile writes it ({error!r}): profile again"
        ) from None


def _subject(work: Mapping[str, Any], name: str, counted: str) -> Subject:
    if work.get("format") != FORMAT:
        raise InputError(
            f"'{name}' is a profile of format {work.get('format')!r}; this Vivace reads format {FORMAT}: "
            "profile again"
        )
    absent = [key for key in NEEDED if not work.get(key)]
    if absent:
        raise InputError(f"the profile '{name}' lacks {absent[0]!r}; profile the job again")
    precision = PRECISIONS.get(str(work.get("precision")))
    if precision is None:
        known = ", ".join(PRECISIONS)
        raise InputError(f"'{name}' was profiled in {work.get('precision')!r}; known are {known}")
    size = ITEM_BYTES[precision]
    demand = Demand.from_dict(work["demand"]) if "demand" in work else Demand.from_operators(work, size)
    if not demand.bins or not any(b.bytes for b in demand.bins):
        raise InputError(f"'{name}' holds no operations of a step: profile the job again, for longer")
    batch = int(work["batch_size"])
    if batch < 1:
        raise InputError(f"'{name}' has a batch of {batch} samples: profile the job again")
    found = {key: _amount(work, key, name) for key in AMOUNTS}
    _check(demand, work.get("device"), name)
    state, waiting = found["optimizer_bytes"], found["waiting_seconds_per_sample"]
    precision = _of_weights(precision, str(work["precision"]), found["parameter_bytes"], demand)
    return Subject(
        name,
        demand,
        precision,
        batch,
        found["steps_per_epoch"],
        found["epochs"],
        2.0 * WEIGHT_BYTES.get(precision, 4) * demand.num_parameters if state is None else state,
        found["activation_bytes"] or demand.saved_bytes * batch,
        found["host_seconds_per_sample"],
        work.get("device"),
        found["step_seconds"],
        str(work.get("counted", counted)),
        (found["host_seconds_per_sample"] if waiting is None else waiting) or 0.0,
        found["communication_seconds"] or 0.0,
        bool(work.get("channels_last")),
        found["frozen_bytes"] or 0.0,
        found["batches_at_once"] or 1.0,
        bool(work.get("waits_for_workers", True)),  # older profiles do not say
        tuple(map(str, work.get("notes") or ())),
        _step_memory(work.get("step_memory")),
        _step_memory(work.get("mixed_memory")),
    )


def _step_memory(found: Mapping[str, Any] | None) -> StepMemory | None:
    if found is None:
        return None
    lines = tuple((float(fixed), float(growing)) for fixed, growing in found["lines"])
    return StepMemory(lines, float(found["spared_bytes"]))


def _of_weights(precision: str, told: str, parameter_bytes: float | None, demand: Demand) -> str:
    """``fp16`` or ``bf16`` where the weights themselves are such numbers, else the precision as it is."""
    if precision != "amp" or not 0 < (parameter_bytes or 0.0) < MOST_OF_HALF * demand.num_parameters:
        return precision
    return "fp16" if told in ("float16", "fp16") else "bf16"


def _amount(work: Mapping[str, Any], key: str, name: str) -> float | None:
    """A time, a size or a number of a profile; None where it does not say. Raises InputError where it is
    none."""
    value = work.get(key)
    if value is None:
        return None
    more = key in ABOVE_0
    if type(value) not in (int, float) or not (value > 0 if more else value >= 0) or value == math.inf:
        least = "above 0" if more else "of at least 0"
        raise InputError(f"'{name}' has {key} = {value!r}; a number {least} would be right: profile again")
    return float(value)


def _check(demand: Demand, device: object, name: str) -> None:
    """Refuse work that is no numbers, and a device that is no name."""
    numbers = [demand.num_parameters, demand.num_tensors, demand.saved_bytes, demand.num_left]
    numbers += [n for b in demand.bins for n in (b.count, b.flops, b.bytes, b.constant_bytes)]
    wrong = [n for n in numbers if type(n) not in (int, float) or not 0 <= n < math.inf]
    if wrong:
        raise InputError(f"'{name}' counts {wrong[0]!r} in its work, which is no amount: profile again")
    if device is not None and not isinstance(device, str):
        raise InputError(f"'{name}' has device = {device!r}; a name would be right: profile again")


def _count(reference: str) -> Subject:
    """Count the job on fake tensors in a child process, which imports torch and the job's own code."""
    from vivace.inspection.gather import require_torch

    require_torch()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "work.json"
        command = [sys.executable, "-m", "vivace.memory.imagine", reference, str(out)]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",  # a job may print what is no UTF-8
                timeout=COUNTING_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            if not out.is_file():  # it is there once the work is counted, also before its memory is known
                raise JobError(f"'{reference}' was not counted within {COUNTING_SECONDS} s") from None
        else:
            if not out.is_file():
                last = (done.stderr.strip().splitlines() or ["no message"])[-1]
                ended = f"ended with code {done.returncode}: {last}"
                raise JobError(f"counting the work of '{reference}' {ended}")
        document = json.loads(out.read_text(encoding="utf-8"))
    if "error" in document:
        raise VivaceError.from_dict(document["error"])
    found = _subject(document["work"], reference, "fake")
    unknown = () if found.step_memory else (UNKNOWN_MEMORY,)
    return dataclasses.replace(found, notes=(*found.notes, *unknown))
