"""`vivace.train`: trains a Job under a Plan, and watches that the plan keeps its promise in this very run.

Where it is asked to, it finds the plan on the run's own steps, or lets ranks train on a Ray cluster.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vivace.errors import InputError
from vivace.events import OnEvent
from vivace.job import Job
from vivace.live.underway import Underway
from vivace.machine import Machine
from vivace.plan import Plan
from vivace.training import training
from vivace.training.crew import num_ranks
from vivace.training.options import Changed, OnNan, Options
from vivace.training.ranks import Ranks
from vivace.training.training import Run, WatchedBy
from vivace.training.watch import Watch
from vivace.watching.sentinel import OnBroken
from vivace.watching.watched import SHARE, Maker, watched_by


def train(
    job: Job | str,
    plan: Plan | str | os.PathLike[str] | None = None,
    *,
    out: str | os.PathLike[str] = "runs/train",
    resume: bool = False,
    restart: bool = False,
    seed: int | None = None,
    max_steps: int | None = None,
    checkpoint_every_seconds: float = 600.0,
    checkpoint_every_steps: int | None = None,
    rank_timeout_seconds: float = 300.0,
    deadline_seconds: float | None = None,
    changed: Changed = "refuse",
    on_nan: OnNan = "rollback",
    on_event: OnEvent | None = None,
    watch: float = SHARE,
    on_broken: OnBroken = "stop",
    tune: bool = False,
    engine: str | None = None,
    address: str | None = None,
    ranks: int | None = None,
) -> Run:
    """Train `job` under `plan` in the run folder `out`, on top of strict fp32.

    Writes plan.toml, metrics.jsonl (epochs counted from 1), tensorboard/, checkpoints/, at the end model.pt
    (your own `state_dict` keys) and run.json. Ctrl-C, SIGTERM, SIGHUP (a lost terminal) or SIGUSR1 (Slurm)
    stops after the current step with a checkpoint. Ranks that torchrun starts again resume by themselves.
    Under a plan some steps are repeated under the reference and compared, which changes no number of the run.

    Args:
        job: a Job, or a reference such as ``train.py:job``.
        plan: how to train, or its file; left out, a resumed run keeps its plan, a new one has none.
        out: the run folder; new or empty, unless `resume` or `restart`.
        resume: go on from the newest checkpoint that holds; from zero where there was none yet.
        restart: delete the folder's checkpoints and train from zero.
        seed: of weights, data order and all randomness; left out, a resumed run keeps its own, else 0.
        max_steps: stop after so many steps in all, counted over resumed parts too.
        checkpoint_every_seconds: the most time that a kill can cost.
        checkpoint_every_steps: write one after each so many steps too.
        rank_timeout_seconds: how long the others wait for one of several ranks that hangs or is gone.
        deadline_seconds: stop with a checkpoint before this process has lived so long.
        changed: ``ok`` resumes with another source or other hyper-parameters than the run began with.
        on_nan: where the loss is no finite number, ``rollback`` once to the last good state, or ``stop``.
        on_event: called with a `vivace.Event` as the run goes on (on rank 0).
        watch: the share of the run's time that watching may take, the first step apart; 0: watch nothing.
        on_broken: where a watched step does not train the same model, ``stop`` with a checkpoint of the state
            before it, ``fallback`` to the reference from there on, or ``ignore`` it and only write it down.
        tune: find a plan on the run's own first steps, all of which train, and go over to it; see ``tune/``
            in the run folder. In one process, without a `plan`. A resumed run keeps the plan it has found.
        engine: ``ray``: ranks train on a Ray cluster whose nodes share `out`, without torchrun.
        address, ranks: of its head, ``HOST:PORT`` or ``auto``; and how many, left out, one a GPU or node.

    Raises FolderError, CheckpointError, PlanError, JobError, Refused, Diverged, PromiseBroken and RankLost,
    on all ranks alike.
    """
    first = (max_steps, checkpoint_every_seconds, checkpoint_every_steps)
    options = vars(Options(0, *first, rank_timeout_seconds, deadline_seconds, changed, on_nan))
    options |= {"seed": seed, "out": out, "resume": resume, "restart": restart, "on_event": on_event}
    return _begun(job, plan, (engine, address, ranks), (watch, on_broken, tune), options)


def _begun(
    job: Job | str,
    plan: Plan | str | os.PathLike[str] | None,
    cluster: tuple[str | None, str | None, int | None],
    watching: tuple[float, OnBroken, bool],
    options: dict[str, Any],
) -> Run:
    """`train` here, or by its engine, address and number of ranks."""
    engine, address, ranks = cluster
    watch, on_broken, tune = watching
    if engine not in (None, "ray"):
        raise InputError(f"ranks are started by torchrun, or with engine ray, not '{engine}'")
    if engine is not None:
        from vivace.live import on_ray

        options |= {"watch": watch, "on_broken": on_broken, "tune": tune}
        return on_ray.train(train, job, plan, address=address or "auto", ranks=ranks, **options)
    if address is not None or ranks is not None:
        option = f"address '{address}'" if address is not None else f"number of ranks {ranks}"
        raise InputError(f"the {option} is for a Ray cluster: give --engine ray with it")
    maker = watched_by(watch, on_broken)
    if not tune:
        return training.train(job, plan, watched_by=maker, **options)
    _require_alone(plan)
    name = job if isinstance(job, str) else ""
    return training.train(job, plan, watched_by=_led(name, maker), **options)


def _led(name: str, maker: Maker) -> WatchedBy:
    """Who leads a run that has no plan until it finds one, and watches its steps from there on.

    `name` is the reference of the job, which may be empty.
    """

    def led_by(job: Job, plan: Plan, machine: Machine, seed: int, ranks: Ranks, folder: Path) -> Watch:
        sought = not plan.techniques
        if sought:
            _require_whole_step(job)
        watch = maker(job, None if sought else plan, machine, seed, ranks, folder)
        return Underway(folder, name, watch)

    return led_by


def _require_alone(plan: Plan | str | os.PathLike[str] | None) -> None:
    """Raises InputError where a plan was given, or several ranks would each find one."""
    if plan is not None:
        raise InputError("tune finds a plan while it trains, and a plan was given: leave one of them out")
    if num_ranks() > 1:
        raise InputError(
            f"tune=True (--tune) works in one process, and {num_ranks()} ranks were started: let vivace tune "
            "find a plan on the ranks first, and train with that (--plan)"
        )


def _require_whole_step(job: Job) -> None:
    """Raises InputError where no plan can be sought on a run's own steps."""
    if job.step is not None:
        raise InputError(
            "tune=True (--tune) needs a Job with loss and optimizer, and this one has a step of its own: "
            "vivace tune finds a plan for it before it trains"
        )
