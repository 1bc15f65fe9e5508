"""`vivace.sweep`: many runs of one job over ranges of its parameters, and the best of them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vivace.errors import InputError
from vivace.events import OnEvent
from vivace.inspection.gather import require_torch
from vivace.job import Job
from vivace.plan import Plan

if TYPE_CHECKING:
    from vivace.sweeping.result import Swept as Swept


def sweep(
    job: Callable[..., Job] | str,
    space: Mapping[str, Any] | Sequence[str],
    *,
    trials: int = 60,
    seeds: int = 3,
    seed: int = 0,
    plan: Plan | str | os.PathLike[str] | None = None,
    workers: int | None = None,
    out: str | os.PathLike[str] = "runs/sweep",
    resume: bool = False,
    against: str | None = None,
    transfer: str | None = None,
    engine: str | None = None,
    address: str | None = None,
    on_event: OnEvent | None = None,
) -> Swept:
    """Search the parameters of `job` for the best metric.

    A trial that is killed, runs out of memory or leaves the finite numbers fails with its parameters and its
    reason, and the sweep goes on. Killed or interrupted itself, it goes on with `resume` where it stood.

    Args:
        job: a function of named parameters that returns a Job with a metric, or its ``train.py:job``.
        space: ranges by name, as texts (``1e-4..1e-1:log``, ``2..6``, ``32,64,128``), as Optuna's
            distributions, or plain values; or a list of ``name=range``.
        trials: how many, those of a resumed sweep counted.
        seeds: under how many other seeds the best three configurations are trained again; 0: not at all.
        seed: of the search, and of every trial.
        plan: under which each trial trains, or its file; left out, strict fp32.
        workers: trials at a time; left out, as many as are measured faster and memory has room for.
        out: folder for the journal, the runs, the page and best.py.
        resume: go on with the sweep that `out` holds.
        against: ``seconds`` of a step or ``parameters``: also find what no other beats in both; prunes none.
        transfer: the model's width: learning rates are carried over from its smallest value (muP).
        engine: ``ray``: trials run on a Ray cluster whose nodes share `out`; left out, on this machine.
        address: of the cluster's head, HOST:PORT; left out, the cluster of which this machine is a node.
        on_event: called with a `vivace.Event` as the sweep goes on.

    Raises InputError, JobError, FolderError where they cannot be used, AnswerIsNo where no first trial ends.
    """
    require_optuna()
    from vivace.sweeping.searching import run_sweep

    return run_sweep(
        job,
        space,
        trials=trials,
        seeds=seeds,
        seed=seed,
        plan=plan,
        workers=workers,
        out=out,
        resume=resume,
        against=against,
        transfer=transfer,
        engine=engine,
        address=address,
        on_event=on_event,
    )


def require_optuna() -> None:
    """Raises InputError where torch or the search engine is not installed."""
    require_torch()
    if importlib.util.find_spec("optuna") is None:
        raise InputError("a sweep needs Optuna: pip install 'vivace[sweep]'")


def __getattr__(name: str) -> Any:
    if name == "Swept":
        from vivace.sweeping.result import Swept

        return Swept
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
