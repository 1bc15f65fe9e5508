"""One trial: the child's side, and what its parent makes of it."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from optuna.distributions import FloatDistribution
from optuna.trial import TrialState

import vivace
from vivace.errors import ChildFailed, JobError
from vivace.events import Event, EventKind
from vivace.job import JobFunction
from vivace.plan import Plan
from vivace.processes.launch import Source
from vivace.sweeping import searching, trial
from vivace.sweeping.folder import SweepFolder
from vivace.sweeping.packing import Packing
from vivace.sweeping.record import record_of
from vivace.sweeping.runs import Runs
from vivace.sweeping.space import to_dict
from vivace.sweeping.study import Setting, Study

JOBS = Path(__file__).parent / "jobs.py"


def test_a_trial_that_came_to_its_end_is_not_pruned(jobs, tmp_path, monkeypatch):
    """Whoever trains it, and whatever others reached."""
    told, space = [], {"lr": FloatDistribution(0.1, 1.0)}

    def trained(asked, out, seed, heard):
        monkeypatch.setattr(trial, "ask_parent", lambda found: told.append(found) or heard(found))
        made = trial.Trial(JobFunction(jobs.job), torch.get_num_threads())
        return made.train(asked.parameters, {}, out, seed)

    with SweepFolder(tmp_path / "out", resume=False) as folder:
        study = Study(folder.journal, Setting("job", to_dict(space), {"epochs": 2}, 0, 9), space)
        runs = Runs(study, folder, Source(""), Plan(), packing=Packing(1, 1), tell=lambda *_: None)
        monkeypatch.setattr(runs, "_train", trained)
        for at in (2, 1):
            monkeypatch.setattr(study, "report", lambda number, epoch, metric, at=at: epoch == at)
            runs._try(study.ask())
    assert [(one["epoch"], one["ended"]) for one in told] == [(1, False), (2, True), (1, False)]
    assert [one.state for one in study.counted()] == [TrialState.COMPLETE, TrialState.PRUNED]
    pruned = record_of(study.counted()[1], {})
    assert searching._saved([pruned], study.setting.epochs) == pruned.seconds > 0  # one of its two epochs


@pytest.mark.parametrize("prune", [False, True])
def test_a_trial_builds_its_model_once(jobs, tmp_path, monkeypatch, prune):
    """A second one beside the first may not fit into the memory, and would end what has been trained."""
    built = []

    def model():
        assert not built, "it is built a second time"
        built.append(torch.nn.Linear(6, 3))
        return built[0]

    monkeypatch.setattr(trial, "ask_parent", lambda _: {"prune": prune})
    job = JobFunction(lambda: dataclasses.replace(jobs.job(), model=model))
    found = trial.Trial(job, torch.get_num_threads()).train({}, {}, str(tmp_path / "run"), 0)
    assert (found["pruned"], found["num_parameters"], found["of_epochs"]) == (prune, 21, 3)


@pytest.mark.parametrize(
    ("kept", "left"),
    [
        ("format = 1\n[techniques.channels_last]\n[techniques.micro_batches]\n", ""),  # out of memory since
        ("format = 1\n", "a watched step was not the same"),
    ],
)
def test_a_pruned_trial_says_whether_its_plan_acted(jobs, tmp_path, monkeypatch, kept, left):
    def train(*_, on_event, **__):
        on_event(Event(EventKind.EPOCH, {"epoch": 1, "metric": 0.5, "loss": 0.1, "step": 6}))

    monkeypatch.setattr(trial, "ask_parent", lambda _: {"prune": True})
    made = trial.Trial(JobFunction(jobs.job), torch.get_num_threads())
    declined = made.train({}, {"channels_last": {}}, str(tmp_path / "declined"), 0)
    assert declined["pruned"]
    assert "convolution" in declined["plan_left"]
    monkeypatch.setattr(trial, "train", train)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "plan.toml").write_text(kept)
    assert made.train({}, {"channels_last": {}}, str(tmp_path / "run"), 0)["plan_left"] == left


@pytest.mark.parametrize(
    ("broken", "left"),
    [([], "it had been left before the trial went on"), ([3], "a watched step was not the same")],
)
def test_a_resumed_trial_says_why_its_plan_was_left_before(jobs, tmp_path, monkeypatch, broken, left):
    def train(*_, on_event, **__):
        on_event(Event(EventKind.EPOCH, {"epoch": 2, "metric": 0.5, "loss": 0.1, "step": 12}))

    (tmp_path / "checkpoints").mkdir()
    Plan().save(tmp_path / "plan.toml")
    held = {"plan": "format = 1\n", "held": {"watched": {"broken_steps": broken}}}
    monkeypatch.setattr(trial, "whole_manifest", lambda _: held)
    monkeypatch.setattr(trial, "ask_parent", lambda _: {"prune": True})
    monkeypatch.setattr(trial, "train", train)
    made = trial.Trial(JobFunction(jobs.job), torch.get_num_threads())
    assert made.train({}, {"channels_last": {}}, str(tmp_path), 0)["plan_left"] == left


def test_a_configuration_without_a_metric_fails_alone(jobs, tmp_path):
    """Of a job in which a parameter takes the metric away."""

    def job(measured=True):
        return jobs.job() if measured else dataclasses.replace(jobs.job(), metric=None)

    with pytest.raises(JobError, match="needs the Job's metric"):
        trial.Trial(JobFunction(job), torch.get_num_threads()).train(
            {"measured": False}, {}, str(tmp_path), 0
        )


def test_a_configuration_that_fails_under_other_seeds_is_not_the_best(tmp_path):
    """Although the search saw more of it, and the seeds that it survived did."""
    space = {"lr": FloatDistribution(0.1, 1.0)}
    with SweepFolder(tmp_path / "out", resume=False) as folder:
        study = Study(folder.journal, Setting("job", to_dict(space), {}, 0, 1), space)
        for metric in (0.9, 0.8, 0.7):
            study.complete(study.ask().number, [metric])
        runs = Runs(study, folder, Source(""), Plan(), packing=Packing(1, 1), tell=lambda *_: None)

        def repeat_alone(asked, seed):
            fails = asked.number == 0 or (asked.number, seed) == (1, 2)
            runs._repeated(asked, seed, JobError("it left the finite numbers") if fails else 0.8)

        runs.fusing, runs._repeat_alone = False, repeat_alone
        found = searching._finalists(study, runs, 2)
        notices = searching._notices([], runs)
    assert [(one.number, one.num_seeds) for one in found] == [(2, 2), (1, 1), (0, 0)]
    behind = "and stands behind those that failed less; under seed 2: it left the finite numbers"
    assert notices == [
        f"trial 0 failed under 2 other seeds, {behind}",
        f"trial 1 failed under 1 other seed, {behind}",
    ]


def test_learning_rates_that_cannot_be_carried_over_are_told_before_any_trial(tmp_path):
    with pytest.raises(
        JobError, match=r"schedule=step, lr=0.1, width=8: .*OneCycleLR sets learning rates itself"
    ):
        vivace.sweep(
            f"{JOBS}:job", ["lr=0.1..1", "width=4,8", "schedule=step"], transfer="width", out=tmp_path / "out"
        )
    assert not (tmp_path / "out" / "study.journal").exists()


def test_a_trial_that_is_told_to_stop_has_failed(jobs, tmp_path, monkeypatch):
    ended = SimpleNamespace(interrupted=True, interrupted_by="SIGTERM", epochs=1)
    monkeypatch.setattr(trial, "train", lambda *_, **__: ended)
    with pytest.raises(ChildFailed, match="stopped by SIGTERM in epoch 2"):
        trial.Trial(JobFunction(jobs.job), torch.get_num_threads()).train({}, {}, str(tmp_path / "run"), 0)
