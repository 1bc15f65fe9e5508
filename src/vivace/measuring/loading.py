"""Can this host feed the step, where worker processes load, or something of which that cannot be asked?

The waiting alone does not tell: on a CPU workers slow the step down. So one core's loading and the step are
each timed by themselves.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from vivace import words
from vivace.blame import blame
from vivace.inspection.limits import usable_cores
from vivace.job import Batch, Job
from vivace.ledger import Profile
from vivace.observing.observe import now
from vivace.observing.reference import in_cores
from vivace.session.opening import readable
from vivace.session.session import Session
from vivace.tensors.loaders import with_workers
from vivace.tensors.randomness import Streams, derive
from vivace.tensors.settings import on_threads
from vivace.tensors.trees import Again, batch_size
from vivace.torch_internals.loaders import iterates_itself

SECONDS = 0.5
LITTLE = 0.05  # of a step: waiting of which nothing is said


def limit_beside(session: Session, job: Job, loader: Iterable[Batch], batch: Batch, profile: Profile) -> str:
    """What one core loads against what the step consumes, or why that cannot be measured.

    Empty where loading is no limit, and where the fetches of the profile told it: a DataLoader without
    workers. Steps the session.

    Args:
        loader: what the job's `data` returned; `batch` is one of its batches.
    """
    waits = profile.shares["data"]
    if not isinstance(loader, DataLoader):
        why = f"a {type(loader).__name__} loads in its own way"
    elif not loader.num_workers:
        return ""
    else:
        why = _unreadable(loader)
        if not why:
            one, why = _loaded_by_one_core(loader, job)
    if not why:
        assert isinstance(loader, DataLoader)
        return _sentence(one, _consumed(session, batch), loader.num_workers, profile)
    if waits < LITTLE:
        return ""
    waiting = f"the step waits {words.percent(waits)} of its time for data"
    return f"{waiting}; what a core loads cannot be measured: {why}"


def _sentence(one: float, wanted: float, workers: int, profile: Profile) -> str:
    """In words: samples a second that one core loads, and that the step consumes on a batch at hand."""
    cores, waits = usable_cores(), profile.shares["data"]
    all_cores = in_cores(cores)
    yours = f"your {workers} workers" if workers > 1 else "your worker"
    head = f"a core loads {one:,.0f} samples a second, the step consumes {wanted:,.0f}: "
    if one * cores < wanted:
        return head + f"with {all_cores} no number of workers can feed it; less work for each sample can"
    if one * workers < wanted:
        return head + f"{in_cores(math.ceil(wanted / one))} feed it, and {yours} cannot"
    if waits < LITTLE:
        return ""
    crowded = profile.device == "cpu" and workers + profile.features.get("num_threads", 1) > cores
    share = f": they share {all_cores} with it" if crowded else ""
    return head + f"{yours} could feed it, and yet it waits {words.percent(waits)} of its time{share}"


def _unreadable(loader: DataLoader[Any]) -> str:
    if iterates_itself(loader):
        return f"your {type(loader).__name__} iterates in its own way"
    return "your worker_init_fn acts in workers only" if loader.worker_init_fn else ""


def _loaded_by_one_core(loader: DataLoader[Any], job: Job) -> tuple[float, str]:
    """Samples a second, read here as a worker would, on one thread; or why this cannot be.

    Of more than one batch the first is left out: files are opened in it and buffers filled.
    """
    begin, read = time.perf_counter(), list[tuple[float, int]]()
    try:
        with on_threads(1), Streams(derive(0, "loading")):
            for batch in readable(_here(loader), job):
                read.append((time.perf_counter() - begin, batch_size(batch)))
                if read[-1][0] > SECONDS:
                    break
    except Exception as error:  # a person's dataset may count on being in a worker
        return 0.0, f"outside of a worker it fails with {blame(error)}"
    if not read:
        return 0.0, f"outside of a worker your {type(loader.dataset).__name__} gives nothing"
    begun, left_out = (read[0][0], 1) if len(read) > 1 else (0.0, 0)
    return sum(size for _, size in read[left_out:]) / (read[-1][0] - begun), ""


def _here(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The same DataLoader without worker processes."""
    if not isinstance(loader.dataset, IterableDataset):
        return with_workers(loader, 0, 2, persistent=False)
    size, collate = loader.batch_size, loader.collate_fn
    return DataLoader(loader.dataset, batch_size=size, collate_fn=collate, drop_last=loader.drop_last)


def _consumed(session: Session, batch: Batch) -> float:
    """Samples a second of the step alone, on a batch at hand."""
    device, spent, again = session.build.device, list[float](), Again(batch)
    while len(spent) < 4 or (sum(spent) < SECONDS and len(spent) < 30):
        fresh, begin = again(), now(device)
        session.step(fresh)
        spent.append(now(device) - begin)
    return batch_size(batch) / statistics.median(spent[1:])
