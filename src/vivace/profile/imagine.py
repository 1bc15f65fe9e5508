"""Count one training step of a job on fake tensors: what another card would have to do, without running it
here.

    python -m vivace.profile.imagine JOB OUT.json

Run in a child process, because a job's own code is imported. Where the job cannot be built on fake tensors
(it reads a value back, or loads a checkpoint), one real step is run and counted instead; the document says
which.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sized
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from vivace.errors import JobError, VivaceError
from vivace.files import replace_text
from vivace.job import Job, blame, load
from vivace.profile.bins import bins_of
from vivace.profile.work import Work, count_work
from vivace.surgery import batch_size

FORMAT = 1


def imagine(job: Job, name: str) -> dict[str, Any]:
    """The ``work`` of a profile for one step of `job`: counts, sizes and amounts, with no seconds in them.

    Raises JobError in the person's own words where the job can be run neither way.
    """
    loader: Any = job.data()
    try:
        batch = next(iter(loader))
    except StopIteration:
        raise JobError("the job's data yields no batch") from None
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = tree_map_only(torch.Tensor, mode.from_tensor, batch)
            work, model, state = _step(job, fake)
        how = "fake"
    except VivaceError:
        raise
    except Exception:
        work, model, state = _step(job, batch)
        how = "real"
    samples = batch_size(batch) or 1
    parameters = [p for p in model.parameters() if p.requires_grad]
    half = any(a.item_bytes == 2 for k in work.kernels if k.flops for a in k.reads)
    return {
        "format": FORMAT,
        "name": name,
        "counted": how,
        "precision": "amp" if half else "fp32",
        "batch_size": samples,
        "steps_per_epoch": len(loader) if isinstance(loader, Sized) else None,
        "epochs": job.epochs,
        "step_seconds": None,
        "operators": {kind: {**totals, "seconds": None} for kind, totals in work.to_dict().items()},
        "num_parameters": sum(p.numel() for p in parameters),
        "num_tensors": len(parameters),
        "parameter_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "optimizer_bytes": state,
        "activation_bytes": work.saved_bytes,
        "peak_bytes": None,
        "host_seconds_per_sample": None,
        "device": None,
        "demand": _demand(work, samples, parameters),
    }


def _step(job: Job, batch: Any) -> tuple[Work, torch.nn.Module, int]:
    """One counted step: its work, the model, and the bytes of the optimizer's state after it."""
    model = job.model()
    if isinstance(model, (list, tuple)):
        model = torch.nn.ModuleList(model)
    elif isinstance(model, dict):
        model = torch.nn.ModuleDict(model)
    model.train()
    optimizer = job.optimizer(model) if job.optimizer else None

    def run() -> None:
        if job.step is not None:
            job.step(model, optimizer, batch)
            return
        assert job.loss is not None
        job.loss(model, batch).backward()
        if optimizer is not None:
            optimizer.step()

    try:
        work = count_work(run)
    except VivaceError:
        raise
    except Exception as error:
        raise _Unimaginable(f"one step of the job fails: {blame(error)}") from error
    tensors: list[torch.Tensor] = []
    for entry in getattr(optimizer, "state", {}).values():
        tensors += [value for value in entry.values() if isinstance(value, torch.Tensor)]
    return work, model, sum(t.numel() * t.element_size() for t in tensors)


class _Unimaginable(Exception):
    """A step failed; on fake tensors that is no fault of the job's."""


def _demand(work: Work, samples: int, parameters: list[torch.nn.Parameter]) -> dict[str, Any]:
    bins = bins_of([k for k in work.kernels if k.phase != "update"], samples)
    names = ("kind", "count", "flops", "bytes", "constant_bytes")
    return {
        "bins": [dict(zip(names, b, strict=True)) for b in bins],
        "num_parameters": sum(p.numel() for p in parameters),
        "num_tensors": len(parameters),
        "saved_bytes": work.saved_bytes / samples,
    }


def main() -> None:
    """Write the document; errors are one JSON document too, and exit code 2."""
    name, out = sys.argv[1], Path(sys.argv[2])
    try:
        document: dict[str, Any] = {"work": imagine(load(name), name)}
        code = 0
    except VivaceError as error:
        document, code = {"error": {"kind": error.kind, "message": str(error)}}, 2
    except Exception as error:
        document, code = {"error": {"kind": "JobError", "message": str(error) or blame(error)}}, 2
    replace_text(out, json.dumps(document))
    sys.exit(code)


if __name__ == "__main__":
    main()
