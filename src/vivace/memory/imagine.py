"""Count one training step of a job on fake tensors: what another card would have to do, without running it
here.

    python -m vivace.memory.imagine JOB OUT.json [real]

Run in a child process, because a job's own code is imported. A model that cannot be built on fake tensors
(it draws its weights again until they fit, or loads a checkpoint) is built on real ones and copied; where its
step cannot be run on fake ones either (it reads a value back), one real step is run and counted instead, and
the document says so; in a process that starts again, since the job's own caches hold fake tensors by then.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vivace import words
from vivace.blame import blame
from vivace.errors import JobError, VivaceError
from vivace.files import replace_text
from vivace.job import Batch, Job
from vivace.memory.forgetting import empty_caches
from vivace.memory.on_gpus import autocast_here, load_as_on_gpus
from vivace.memory.predict import predict
from vivace.plan import Plan
from vivace.session.opening import LOOKING_SECONDS, Seen, look_through, models_of, parts_of, readable
from vivace.technique import Numerics, Stage
from vivace.technique.registry import lowering_the_peak
from vivace.tensors.loaders import known_length
from vivace.tensors.trees import batch_size, bytes_of
from vivace.torch_internals.tensors import (
    FakeBuildMode,
    FakeCopyMode,
    FakeTensorMode,
    dense_parts,
    tree_map_only,
)
from vivace.work.bins import bins_of, item_bytes_of
from vivace.work.count import Work, count_work
from vivace.work.sparse import SparseCopies

FORMAT = 1
HERE = torch.bfloat16  # for autocast to any sixteen bits: not every processor computes in float16
PRECISIONS = {8: "fp64", 2: "amp"}  # by the bytes of a number


def imagine(
    job: Job, name: str, *, real: bool = False, keep: Callable[[dict[str, Any]], object] = lambda work: None
) -> dict[str, Any]:
    """The ``work`` of a profile for one step of `job`: counts, sizes and amounts, with no seconds in them.

    Where batches differ, it is the work of one of mean size, and what is kept for the largest; of those that
    a few seconds of looking through the data show.

    The step runs on fake tensors, or on `real` ones. `keep` is given what was counted before the memory of
    the step is predicted, which takes as long again and may end the process. Raises JobError in the person's
    own words where the job cannot be built, and NeedsNumbers where fake tensors do not suffice.
    """
    loader: Any = job.data()
    seen = look_through(readable(loader, job), LOOKING_SECONDS)
    if not seen.sizes:
        raise JobError("the Job's data() gave no batch")
    mean = sum(seen.sizes) / len(seen.sizes)
    usual, largest = seen.nearest(mean), max(seen.by_size)
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def counted(size: int) -> Step:
        batch = seen.by_size[size]
        with autocast_here(HERE if real else None):
            return _step(job, job.model(), batch) if real else _imagined(job, batch, mode)

    work, model, state = counted(usual)
    kept = work.saved_bytes if usual == largest else max(counted(largest)[0].saved_bytes, work.saved_bytes)
    samples = batch_size(seen.by_size[usual]) or 1
    empty_caches(mode)
    parameters = [p for p in model.parameters() if p.requires_grad]
    document = {
        "format": FORMAT,
        "name": name,
        "counted": "real" if real else "fake",
        "precision": _precision(item_bytes_of(work.kernels), parameters),
        "batch_size": samples,
        "steps_per_epoch": known_length(loader),
        "epochs": job.epochs,
        "step_seconds": None,
        "operators": {kind: {**totals, "seconds": None} for kind, totals in work.to_dict().items()},
        "num_parameters": _numbers(parameters),
        "num_tensors": len(parameters),
        "parameter_bytes": bytes_of(parameters),
        "frozen_bytes": bytes_of(p for p in model.parameters() if not p.requires_grad)
        + bytes_of(model.buffers()),
        "optimizer_bytes": state,
        "activation_bytes": kept,
        "peak_bytes": None,
        "host_seconds_per_sample": None,
        "device": None,
        "demand": _demand(work, samples, parameters, mean / usual if usual else 1.0),
        "notes": _notes(seen, real=real),
    }
    keep(document)
    own = document["precision"] == "amp"
    return document if real else {**document, **_memory(job, seen.by_size[largest], mixed=own)}


def _memory(job: Job, batch: Batch, *, mixed: bool) -> dict[str, Any]:
    """What a GPU needs for a step as it is, and for one in mixed precision, which may be the same; nothing
    where that cannot be predicted.
    """
    narrower = [
        cls() for cls in lowering_the_peak("cuda", Numerics.ROUNDING) if cls.card.stage == Stage.PRECISION
    ]

    def told(plan: Plan) -> dict[str, Any]:
        predicted = predict(job, plan, batch=batch, device="cuda")
        return {"lines": predicted.lines, "spared_bytes": predicted.spared_bytes}

    found = {}
    with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):
        found["step_memory"] = told(Plan())
        found["mixed_memory"] = found["step_memory"] if mixed else told(Plan(narrower[:1]))
    return found


def _notes(seen: Seen, *, real: bool) -> list[str]:
    """What a person should know of how it was counted."""
    notes = []
    if not seen.all and len(set(seen.sizes)) > 1:
        number = words.number(len(seen.sizes))
        notes.append(f"batches differ, and only the first {number} were looked at: later ones may be larger")
    if real:
        notes.append(
            "the step looks at numbers, so a processor's operators were counted: of attention, dropout and "
            "recurrent layers a GPU has others"
        )
    return notes


def _precision(size: int, parameters: list[torch.nn.Parameter]) -> str:
    """In what the step computes, by the bytes of a number: that of the weights where they are as narrow."""
    narrow = [str(p.dtype).removeprefix("torch.") for p in parameters if p.itemsize == size == 2]
    return narrow[0] if narrow else PRECISIONS.get(size, "fp32")


Step = tuple[Work, torch.nn.Module, int]


class NeedsNumbers(Exception):
    """The step of a job cannot be run on tensors without numbers."""


def _imagined(job: Job, batch: Batch, mode: FakeTensorMode) -> Step:
    """One step counted on fake tensors. Raises NeedsNumbers where it cannot be run on them."""
    with mode:
        fake = tree_map_only(torch.Tensor, mode.from_tensor, batch)
        try:
            with FakeBuildMode():
                built = job.model()
            return _step(job, built, fake)
        except VivaceError:
            raise
        except Exception:
            pass
    try:
        built = job.model()
        with mode:
            with FakeCopyMode(mode):
                copied = copy.deepcopy(built)
            return _step(job, copied, fake)
    except VivaceError:
        raise
    except Exception as error:
        raise NeedsNumbers from error


def _step(job: Job, built: object, batch: Batch) -> Step:
    """One counted step on what the job's model() returned: its work, the modules in it as one, and the bytes
    of the optimizer's state after it.
    """
    model = torch.nn.ModuleList(models_of(job, built))
    model.train()
    optimizer = job.optimizer(built) if job.optimizer else None
    tables = (torch.nn.Embedding, torch.nn.EmbeddingBag)

    def run() -> None:
        with SparseCopies():  # type: ignore[no-untyped-call]
            if job.step is not None:
                job.step(built, optimizer, batch)
                return
            assert job.loss is not None
            job.loss(built, batch).backward()
            if optimizer is not None:
                optimizer.step()

    try:
        if any(isinstance(module, tables) and module.sparse for module in model.modules()):
            run()  # the first update makes states as large as the tables; all others touch rows alone
            model.zero_grad()
        work = count_work(run)
    except VivaceError:
        raise
    except Exception as error:
        raise _Unimaginable(f"one step of the job fails: {blame(error)}") from error
    tensors: list[torch.Tensor] = []
    for one in parts_of(optimizer, torch.optim.Optimizer):
        for entry in one.state.values():
            tensors += [value for value in entry.values() if isinstance(value, torch.Tensor)]
    return work, model, bytes_of(tensors)


class _Unimaginable(Exception):
    """A step failed; on fake tensors that is no fault of the job's."""


def _numbers(parameters: list[torch.nn.Parameter]) -> int:
    """How many numbers train; a complex one is two."""
    return sum(p.numel() * (2 if p.is_complex() else 1) for p in parameters)


def _demand(work: Work, samples: int, parameters: list[torch.nn.Parameter], larger: float) -> dict[str, Any]:
    """The work of a mean step, which is so much `larger` than that of the batch that was counted."""
    bins = bins_of([k for k in work.kernels if k.phase != "update"], samples / larger)
    names = ("kind", "count", "flops", "bytes", "constant_bytes")
    return {
        "bins": [dict(zip(names, b, strict=True)) for b in bins],
        "num_parameters": _numbers(parameters),
        "num_tensors": len(parameters),
        "saved_bytes": work.saved_bytes / samples * 4 / item_bytes_of(work.kernels),
        "num_left": sum(p.numel() - _touched(p) for p in parameters),
    }


def _touched(parameter: torch.nn.Parameter) -> int:
    """How many numbers of a weight have a gradient."""
    gradient, number = parameter.grad, parameter.numel()
    return number if gradient is None else min(number, dense_parts(gradient)[-1].numel())


def main() -> None:
    """Write the document; errors are one JSON document too, and exit code 2."""
    name, out, real, here = sys.argv[1], Path(sys.argv[2]), "real" in sys.argv[3:], os.getcwd()

    def keep(work: dict[str, Any]) -> None:
        replace_text(out, json.dumps({"work": work}))

    try:
        job = load_as_on_gpus(name, HERE if real else None)
        document: dict[str, Any] = {"work": imagine(job, name, real=real, keep=keep)}
        code = 0
    except NeedsNumbers:
        sys.stdout.flush()
        os.chdir(here)  # which the job may have left
        os.execv(sys.executable, [sys.executable, "-m", "vivace.memory.imagine", name, str(out), "real"])
    except VivaceError as error:
        document, code = {"error": error.to_dict()}, 2
    except _Unimaginable as error:
        document, code = {"error": JobError(str(error)).to_dict()}, 2
    except Exception as error:
        document, code = {"error": JobError(f"the Job cannot be built: {blame(error)}").to_dict()}, 2
    replace_text(out, json.dumps(document))
    sys.exit(code)


if __name__ == "__main__":
    main()
