"""What `vivace sweep` is held against: plain Optuna in processes, and Ray Tune with Optuna's sampler.

Both train with the loop that a person writes, a process a core with one thread each, over the same space.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import sweep_jobs
import torch

import vivace
from vivace.job import JobFunction

EPOCHS, REDUCTION = 9, 3
LOWEST_RATE, HIGHEST_RATE, LEAST_MOMENTUM, MOST_MOMENTUM, WIDTHS = 1e-3, 1.0, 0.5, 0.98, (16, 32)
SPACE = [
    f"lr={LOWEST_RATE}..{HIGHEST_RATE}:log",
    f"momentum={LEAST_MOMENTUM}..{MOST_MOMENTUM}",
    f"width={','.join(map(str, WIDTHS))}",
]


def optuna_study(journal: str, seed: int) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    backend = optuna.storages.journal.JournalFileBackend(journal)
    return optuna.create_study(
        study_name="plain",
        direction="maximize",
        storage=optuna.storages.JournalStorage(backend),
        sampler=optuna.samplers.TPESampler(seed=seed),
        pruner=optuna.pruners.HyperbandPruner(1, EPOCHS, REDUCTION),
        load_if_exists=True,
    )


def optuna_worker(name: str, journal: str, deadline: float, seed: int) -> None:
    """One process of plain Optuna."""

    def objective(trial: optuna.Trial) -> float:
        def told(epoch: int, metric: float) -> None:
            if time.monotonic() > deadline:
                raise TimeoutError
            trial.report(metric, epoch)
            if trial.should_prune():
                raise optuna.TrialPruned

        parameters = {
            "lr": trial.suggest_float("lr", LOWEST_RATE, HIGHEST_RATE, log=True),
            "momentum": trial.suggest_float("momentum", LEAST_MOMENTUM, MOST_MOMENTUM),
            "width": trial.suggest_categorical("width", WIDTHS),
        }
        return train_plainly(name, parameters, told)

    optuna_study(journal, seed).optimize(
        objective, timeout=max(0.0, deadline - time.monotonic()), catch=(TimeoutError,)
    )


def ray_tune(name: str, seconds: float, seed: int, folder: str, found: str) -> None:
    """Ray Tune on a cluster of this machine's cores, which is there already when its time begins.

    Writes what ended in time to the file `found`. `folder` has a short name: sockets lie there.
    """
    os.environ |= {"HOME": folder, "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ |= {"TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    import ray
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler
    from ray.tune.search.optuna import OptunaSearch

    ray.init(
        num_cpus=vivace.inspect().num_cores,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=80_000_000,
        _node_ip_address="127.0.0.1",
        _temp_dir=f"{folder}/ray",
    )
    ended: list[dict[str, Any]] = []
    deadline = time.monotonic() + seconds

    class Ended(tune.Callback):  # type: ignore[misc]
        def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **_: object) -> None:
            if time.monotonic() < deadline:
                state = "complete" if trial.last_result["epoch"] >= EPOCHS else "pruned"
                told = {"metric": trial.last_result["metric"], "epochs": trial.last_result["epoch"]}
                ended.append({"state": state, "fused": 1, **told})

    def objective(config: dict[str, Any]) -> None:
        train_plainly(name, config, lambda epoch, metric: tune.report({"metric": metric, "epoch": epoch}))

    tune.Tuner(
        tune.with_resources(objective, {"cpu": 1}),
        param_space={
            "lr": tune.loguniform(LOWEST_RATE, HIGHEST_RATE),
            "momentum": tune.uniform(LEAST_MOMENTUM, MOST_MOMENTUM),
            "width": tune.choice(list(WIDTHS)),
        },
        tune_config=tune.TuneConfig(
            metric="metric",
            mode="max",
            search_alg=OptunaSearch(sampler=optuna.samplers.TPESampler(seed=seed)),
            scheduler=ASHAScheduler(max_t=EPOCHS, grace_period=1, reduction_factor=REDUCTION),
            num_samples=-1,
            time_budget_s=seconds,
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(storage_path=f"{folder}/tune", verbose=0, callbacks=[Ended()]),
    ).fit()
    ray.shutdown()
    Path(found).write_text(json.dumps(ended), encoding="utf-8")


def train_plainly(name: str, parameters: dict[str, Any], told: Callable[[int, float], None]) -> float:
    """The loop that a person writes; `told` hears the metric of each epoch, and may raise to end it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    job = JobFunction(getattr(sweep_jobs, name))(**parameters)
    model, metric = job.model(), 0.0
    assert job.optimizer is not None
    assert job.loss is not None
    assert job.metric is not None
    assert job.validation is not None
    optimizer, loader, held_out = job.optimizer(model), job.data(), list(job.validation())
    for epoch in range(1, job.epochs + 1):
        model.train()
        for batch in loader:
            optimizer.zero_grad()
            job.loss(model, batch).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            metric = job.metric(model, held_out)
        told(epoch, metric)
    return metric
