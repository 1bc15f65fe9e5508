"""One whole training of `scripts/bench accuracy`, in its own process; prints one line of JSON.

    python benchmarks/_accuracy_child.py RECIPE WAY SEED BEGAN [--epochs N] [--plan FILE]

WAY is ``strict`` (`vivace train` without a plan: fp32, TF32 off), ``defaults`` (a plain PyTorch loop, without
Vivace, PyTorch's flags as they come) or ``plan``. BEGAN is when the process was started, in seconds of the
epoch: starting Python, importing and building count.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import vivace
from vivace.events import EventKind
from vivace.job import Job, load
from vivace.session.opening import seed_everything

Curve = list[tuple[float, float]]  # seconds since the start, and the metric of the validation data then


def main() -> None:
    """Train once, and tell."""
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe")
    parser.add_argument("way", choices=("strict", "defaults", "plan"))
    parser.add_argument("seed", type=int)
    parser.add_argument("began", type=float)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--plan", type=Path)
    given = parser.parse_args()
    job = dataclasses.replace(load(given.recipe), pictures=None)  # a plain loop draws none either
    if given.epochs is not None:
        job = dataclasses.replace(job, epochs=given.epochs)
    curve: Curve = []

    def note(metric: float) -> None:
        curve.append((time.time() - given.began, metric))

    train = plain if given.way == "defaults" else with_vivace
    model = train(job, given.plan, given.seed, note)
    seconds = time.time() - given.began
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    memory = peak or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    unseen = importlib.import_module(f"vivace.recipes.{given.recipe}").unseen()
    final = measured(job, model, unseen)
    found = {"seconds": seconds, "peak_bytes": memory, "metric": final, "curve": curve}
    print(json.dumps(found), flush=True)


def with_vivace(job: Job, plan: Path | None, seed: int, note: Any) -> Any:
    """By `vivace.train`, watched, with checkpoints, as a person runs it; the model that it left."""

    def listen(event: vivace.Event) -> None:
        if event.kind == EventKind.EPOCH:
            note(event.payload["metric"])

    with tempfile.TemporaryDirectory(prefix="vivace-") as folder:
        run = vivace.train(job, plan, out=Path(folder, "run"), seed=seed, on_event=listen)
        if run.exit_code:
            sys.exit(f"the training came to no end: exit code {run.exit_code}")
        model = job.model()
        model.load_state_dict(torch.load(Path(folder, "run", "model.pt"), weights_only=True))
    return model


def plain(job: Job, _: Path | None, seed: int, note: Any) -> Any:
    """By the loop that everybody writes."""
    assert job.loss is not None
    assert job.optimizer is not None
    seed_everything(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = job.model().to(device)
    optimizer = job.optimizer(model)
    scheduler = job.scheduler(optimizer) if job.scheduler else None
    loader = job.data()
    validation = list(job.validation()) if job.validation else []
    for _ in range(job.epochs):
        model.train()
        for batch in loader:
            loss = job.loss(model, [part.to(device) for part in batch])
            loss.backward()
            if job.on_gradients:
                job.on_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            if scheduler and job.scheduler_every == "step":
                scheduler.step()
        if scheduler and job.scheduler_every == "epoch":
            scheduler.step()
        note(measured(job, model, validation))
    return model


@torch.no_grad()
def measured(job: Job, model: Any, batches: Any) -> float:
    """The job's metric of some batches."""
    assert job.metric is not None
    device = next(model.parameters()).device
    model.eval()
    return job.metric(model, ([part.to(device) for part in batch] for batch in batches))


if __name__ == "__main__":
    main()
