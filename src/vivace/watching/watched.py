"""A training whose steps are watched: the loop with a sentinel around its steps."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias, get_args

from vivace.errors import InputError
from vivace.job import Job
from vivace.machine import Machine
from vivace.plan import Plan
from vivace.training import training
from vivace.training.ranks import Ranks
from vivace.training.training import Run
from vivace.training.watch import Unwatched, Watch
from vivace.watching.sentinel import OnBroken, Sentinel

SHARE = 0.01  # of a run's time

Maker: TypeAlias = Callable[[Job, Plan | None, Machine, int, Ranks, Path], Watch]
"""As `vivace.training.training.WatchedBy`, and without a plan where one is sought while the run trains."""


def train(
    job: Job | str,
    plan: Plan | str | os.PathLike[str] | None = None,
    *,
    watch: float = SHARE,
    on_broken: OnBroken = "stop",
    **settings: Any,
) -> Run:
    """Train a job in this process and watch its steps; see `vivace.train`, which can start ranks and find a
    plan, too.

    `settings` are those of `vivace.training.training.train`. Raises InputError where `watch` or `on_broken`
    is none of the values that `vivace.train` takes.
    """
    return training.train(job, plan, watched_by=watched_by(watch, on_broken), **settings)


def watched_by(share: float, on_broken: OnBroken) -> Maker:
    """Who makes the sentinel of a run, once its job and its plan are known.

    Raises InputError where a value is wrong.
    """
    if on_broken not in get_args(OnBroken):
        raise InputError(f"on_broken is one of {', '.join(get_args(OnBroken))}, not '{on_broken}'")
    if not share >= 0:
        raise InputError(f"watch is a share of the run's time such as 0.01, or 0 for nothing, not {share}")

    def made(job: Job, plan: Plan | None, machine: Machine, seed: int, ranks: Ranks, folder: Path) -> Watch:
        if not share:
            return Unwatched()
        return Sentinel(
            job, plan, machine, seed=seed, ranks=ranks.world_size, on_broken=on_broken, share=share
        )

    return made
