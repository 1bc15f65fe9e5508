"""Whole sweeps of tiny jobs: failures, kills, resuming, and what comes out."""

import dataclasses
import json
import os
import runpy
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import RandomSampler

import vivace
from vivace.errors import AnswerIsNo, FolderError, InputError, JobError, PlanError
from vivace.events import EventKind
from vivace.job import JobFunction, load
from vivace.machine import Device, Machine
from vivace.plan import Plan
from vivace.processes.launch import Source
from vivace.sweeping import packing, searching
from vivace.sweeping import runs as runs_module
from vivace.sweeping.answering import answer
from vivace.sweeping.folder import SweepFolder
from vivace.sweeping.fused import Fused
from vivace.sweeping.packing import Packing
from vivace.sweeping.probe import kind_of
from vivace.sweeping.runs import Runs
from vivace.sweeping.space import space_of, to_dict
from vivace.sweeping.study import Asked, Setting, Study

JOBS = Path(__file__).parent / "jobs.py"
ZYGOTE = str(Path(__file__).parents[1] / "scenes" / "zygote.py")


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep of eight trials of two shapes, two at a time, with seeds; and what it told."""
    heard = []
    out = tmp_path_factory.mktemp("sweep") / "out"
    found = vivace.sweep(
        f"{JOBS}:job",
        ["lr=0.01..1:log", "width=4,8", "epochs=3"],
        trials=8,
        seeds=2,
        workers=2,
        out=out,
        on_event=heard.append,
    )
    return found, out, heard


def test_every_trial_is_there_once(swept):
    found, _, heard = swept
    assert [trial.number for trial in found.trials] == list(range(8))
    assert {trial.state for trial in found.trials} <= {"complete", "pruned"}
    assert len({(t.parameters["lr"], t.parameters["width"]) for t in found.trials}) == 8
    ended = [e.payload["number"] for e in heard if e.kind == EventKind.SWEPT and "seed" not in e.payload]
    assert sorted(ended) == list(range(8))


def test_the_best_is_judged_by_seeds_that_the_search_has_not_seen(swept):
    found, _, _ = swept
    assert 1 <= len(found.finalists) <= 3
    assert all(set(one.spread.values) == {1, 2} for one in found.finalists)
    assert found.best == found.finalists[0].parameters
    assert found.metric == pytest.approx(found.finalists[0].spread.mean)


def test_best_py_is_the_job_that_was_judged(swept, tmp_path):
    """`train` takes it, and reaches what stands in the record: to rounding, where it was part of a stack."""
    found, out, _ = swept
    assert found.job == f"{out / 'best.py'}:job"
    assert load(found.job).epochs == 3
    run = vivace.train(found.job, out=tmp_path / "run", seed=1)
    assert run.metric == pytest.approx(found.finalists[0].spread.values[1], abs=0.02)


def test_document_page_and_journal_are_written(swept):
    found, out, _ = swept
    document = json.loads((out / "sweep.json").read_text())
    assert document["winner"] is found.winner
    assert len(document["trials"]) == 8
    assert "TPE" in document["sampler"]
    page = (out / "sweep.html").read_text()
    assert "<script" not in page
    assert "Parameters and metric" in page
    selected = f"the first is the best of these {len(found.finalists)} under the same seeds"
    assert (selected in page) == (len(found.finalists) > 1)
    (kept,) = (int(path.parent.name.removeprefix("trial_")) for path in out.glob("trials/*/model.pt"))
    assert found.trials[kept].metric == max(trial.metric for trial in found.complete)
    assert not list(out.glob("*/*/checkpoints"))


def test_every_shape_has_a_decision_with_its_baseline(swept):
    found, _, _ = swept
    assert found.fusing
    for one in found.fusing:
        assert set(one["shape"]) == {"width"}
        assert one["fused"] or one["reason"]
        assert "SGD" in one.get("baseline", "SGD")
    fused = [trial for trial in found.trials if trial.fused > 1]
    assert all(trial.sameness.startswith(("exact", "rounding")) for trial in fused)


def test_a_finished_sweep_goes_on_with_more_trials(swept):
    found, out, _ = swept
    more = vivace.sweep(
        f"{JOBS}:job", ["lr=0.01..1:log", "width=4,8", "epochs=3"], trials=9, seeds=0, out=out, resume=True
    )
    assert [trial.number for trial in more.trials] == list(range(9))
    assert [t.metric for t in more.trials[:8]] == [t.metric for t in found.trials]


def test_a_plan_is_proven_in_every_trial_and_left_where_it_is_not_the_same(tmp_path):
    """Also where a width changes the shapes that it was found with."""
    planned = f"{JOBS.parent / 'planned.py'}:job"
    (tmp_path / "plan.toml").write_text("format = 1\n\n[techniques.planted_narrow]\n")
    found = vivace.sweep(
        planned,
        ["width=4,8,16"],
        trials=3,
        seeds=0,
        workers=1,
        plan=tmp_path / "plan.toml",
        out=tmp_path / "out",
    )
    left = {trial.parameters["width"]: trial.plan_left for trial in found.trials}
    assert left[4] == ""
    assert left[8] == "a watched step was not the same"
    assert "the model is 16 wide" in left[16]
    assert {trial.state for trial in found.trials} == {"complete"}
    assert any("the plan did not act to the end in 2 trials" in notice for notice in found.notices)
    found = vivace.sweep(
        planned,
        ["lr=0.1,0.2"],
        trials=2,
        seeds=0,
        workers=1,
        plan=tmp_path / "plan.toml",
        out=tmp_path / "kept",
    )
    assert any(
        "acted in every trial, and its first steps were repeated" in notice for notice in found.notices
    )


def test_trials_that_fail_are_named_and_the_sweep_goes_on(tmp_path):
    troubles = ["", "killed", "memory", "raises", "nan"]
    found = vivace.sweep(
        f"{JOBS}:troubled",
        {"trouble": CategoricalDistribution(troubles), "epochs": 1},
        trials=5,
        seeds=0,
        workers=2,
        out=tmp_path / "out",
    )
    ended = {trial.parameters["trouble"]: trial for trial in found.trials if trial.code != "repeats"}
    assert set(ended) == set(troubles)
    assert {name for name, trial in ended.items() if trial.state == "failed"} == set(troubles[1:])
    assert ended["killed"].code == "killed"
    assert "memory" in ended["memory"].reason
    assert "seven is not allowed" in ended["raises"].reason
    assert "jobs.py, line" in ended["raises"].reason
    assert "finite" in ended["nan"].reason
    assert found.best["trouble"] == ""
    assert found.exit_code == 0


def test_a_sweep_whose_first_trials_all_fail_ends(tmp_path):
    with pytest.raises(AnswerIsNo, match=r"first [56] trials failed.*seven is not allowed"):
        vivace.sweep(
            f"{JOBS}:troubled", {"trouble": "raises", "lr": "0.1..1"}, trials=9, seeds=0, out=tmp_path / "out"
        )


@pytest.mark.parametrize("fusing", [True, False])
def test_trials_that_fail_beside_one_that_trains_on_do_not_end_a_sweep(tmp_path, monkeypatch, fusing):
    """As rows of one stack, or as trials that a second worker runs meanwhile."""
    five_failed = threading.Event()

    def fused(runs, together, shape, further):
        for asked in [*together[1:], *runs.alike(shape, 5), together[0]]:
            tried(runs, asked)

    def tried(runs, asked):
        if asked.number:
            runs.failed(asked, JobError("seven is not allowed"), {}, 0.1)
            if len(study.counted()) >= 5:
                time.sleep(0.2)  # what the end of the fifth brings may come first
                five_failed.set()
        else:
            five_failed.wait(60)
            runs.ended(asked, {"pruned": False, "metric": 0.5}, {1: 0.5}, 0.1)

    monkeypatch.setattr(Runs, "_fuse", fused)
    monkeypatch.setattr(Runs, "_try", tried)
    space = {"lr": FloatDistribution(0.1, 1.0)}
    with SweepFolder(tmp_path / "out", resume=False) as folder:
        study = Study(folder.journal, Setting("job", to_dict(space), {}, 0, 1), space)
        given = {"packing": Packing(1 if fusing else 2, 1), "tell": lambda *_: None, "fusing": fusing}
        runs = Runs(study, folder, Source(""), Plan(), **given)
        runs.search(7)
    assert runs.best == (0.5, 0)
    assert len(study.counted()) == 7


@pytest.mark.parametrize(
    ("job", "space", "error", "sentence"),
    [
        ("job", ["learning_rate=0..1"], InputError, "no parameter 'learning_rate'"),
        ("nobody", ["lr=0..1"], JobError, "no name 'nobody'"),
        ("job,width=4,epochs=1", ["lr=0..1"], JobError, "beside the ranges, as in .*:job width=4 epochs=1"),
        ("OPTIMIZERS", ["lr=0..1"], JobError, "needs a function with parameters"),
        ("accuracy", ["model=0..1", "batches=1"], JobError, "with batches=1, model=0.*jobs.py"),
        ("job", ["width=4.5..8"], JobError, "with width=4.50: .*jobs.py, line"),
    ],
)
def test_what_cannot_be_swept_is_one_sentence(tmp_path, job, space, error, sentence):
    with pytest.raises(error, match=sentence):
        vivace.sweep(f"{JOBS}:{job}", space, trials=2, out=tmp_path / "out")


@pytest.mark.parametrize(
    ("space", "transfer", "sentence"),
    [
        (["lr=0.1..1", "width=4,8"], "lr", "lr changes the shape of no weight"),
        (["lr=0.1..1"], "width", "width is always 8: with --transfer give it a range"),
        (["optimizer=sgd,adam"], "optimizer", "along a number, and optimizer may be 'sgd'"),
    ],
)
def test_a_width_that_is_none_is_one_sentence(tmp_path, space, transfer, sentence):
    with pytest.raises(InputError, match=sentence):
        vivace.sweep(f"{JOBS}:job", space, trials=2, transfer=transfer, out=tmp_path / "out")


def test_a_small_space_ends_the_sweep_and_it_says_so(tmp_path):
    found = vivace.sweep(
        f"{JOBS}:job", ["lr=0.1,0.2,0.3", "epochs=1"], trials=9, seeds=0, workers=1, out=tmp_path / "out"
    )
    assert sorted(trial.parameters["lr"] for trial in found.trials) == [0.1, 0.2, 0.3]
    assert "all 3 combinations were tried: 9 were asked for" in found.notices


def test_a_plan_needs_no_job_of_which_a_parameter_is_searched(tmp_path):
    def job(lr):
        raise AssertionError("not built before it is looked at")

    with pytest.raises(PlanError, match="there is no plan file"):
        vivace.sweep(job, ["lr=0.1..1"], plan=tmp_path / "plan.toml", out=tmp_path / "out")


@pytest.mark.parametrize("wrong", [{"trials": 0}, {"seeds": 1}, {"seed": -1}, {"workers": 0}])
def test_wrong_numbers_are_one_sentence(tmp_path, wrong):
    with pytest.raises(InputError):
        vivace.sweep(f"{JOBS}:job", ["lr=0..1"], out=tmp_path / "out", **wrong)


def _slow(out, ended):
    runpy.run_path(ZYGOTE)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    found = vivace.sweep(
        f"{JOBS}:troubled",
        {"trouble": "slow", "lr": "0.1..1", "epochs": 2},
        trials=5,
        seeds=0,
        workers=2,
        out=out,
    )
    ended.put(found.to_dict())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_sweep_that_is_ended_goes_on_and_counts_nothing_twice(tmp_path, fork_server, how):
    out, queue = tmp_path / "out", fork_server.Queue()
    process = fork_server.Process(target=_slow, args=(str(out), queue))
    process.start()
    journal = out / "study.journal"
    deadline = time.monotonic() + 120
    while not (journal.exists() and journal.read_text().count('"state":1') >= 2):
        assert time.monotonic() < deadline, "no trial ended"
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, how)
    if how != signal.SIGKILL:
        document = queue.get(timeout=60)
        assert document["interrupted"]
        assert document["best"]
        ended = sum(trial["state"] != "open" for trial in document["trials"])
        assert (out / "best.py").read_text().startswith(f'"""The best of {ended} trials of ')
    process.join(60)
    assert not psutil.wait_procs(children, timeout=20)[1], "a trial outlives its sweep"
    found = vivace.sweep(
        f"{JOBS}:troubled",
        {"trouble": "slow", "lr": "0.1..1", "epochs": 2},
        trials=5,
        seeds=0,
        workers=2,
        out=out,
        resume=True,
    )
    assert [trial.number for trial in found.trials] == list(range(5))
    assert {trial.state for trial in found.trials} == {"complete"}
    assert len({trial.parameters["lr"] for trial in found.trials}) == 5


CHANGED = """
import torch, vivace
from torch.nn.functional import mse_loss

def job(lr: float = 0.1) -> vivace.Job:
    return vivace.Job(
        model=lambda: torch.nn.Linear(2, 1),
        data=lambda: [torch.ones(2, 2)] * 3,
        loss=lambda model, batch: mse_loss(model(batch), torch.full((2, 1), TARGET)),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr),
        metric=lambda model, batches: TARGET,
        epochs=2,
    )
"""


def test_what_was_open_begins_anew_where_the_job_has_changed(tmp_path):
    file, out = tmp_path / "train.py", tmp_path / "out"

    def swept(target, trials, **given):
        file.write_text(CHANGED.replace("TARGET", target))
        space = {"lr": "0.1..0.2"}
        return vivace.sweep(f"{file}:job", space, trials=trials, seeds=0, workers=1, out=out, **given)

    assert not any("has changed" in text for text in swept("1.0", 1).notices)
    space = {"lr": FloatDistribution(0.1, 0.2)}
    asked = Study(out / "study.journal", Setting(f"{file}:job", to_dict(space), {}, 0, 2), space).ask()
    vivace.train(
        JobFunction(f"{file}:job")(**asked.parameters), out=out / "trials" / "trial_0001", max_steps=3
    )
    found = swept("2.0", 2, resume=True)
    assert [(one.state, one.metric) for one in found.trials] == [("complete", 1.0), ("complete", 2.0)]
    assert found.notices[0].startswith("the job has changed since this sweep was begun (source of train.py)")
    assert not any("has changed" in text for text in swept("2.0", 2, resume=True).notices)


def test_a_trial_that_had_ended_before_a_kill_has_its_steps_timed(tmp_path):
    """As the kill leaves it that comes before its end is told."""
    out, space, fixed = tmp_path / "out", {"lr": FloatDistribution(0.1, 1.0)}, {"epochs": 1}

    def swept(trials, **given):
        ranges = {**fixed, "lr": "0.1..1"}
        return vivace.sweep(
            f"{JOBS}:job", ranges, trials=trials, seeds=0, workers=1, against="seconds", out=out, **given
        )

    swept(1)
    setting = Setting(f"{JOBS}:job", to_dict(space), fixed, 0, 1, ("metric", "seconds"))
    asked = Study(out / "study.journal", setting, space).ask()
    vivace.train(JobFunction(f"{JOBS}:job")(**asked.parameters), out=out / "trials" / "trial_0001", seed=0)
    found = swept(2, resume=True)
    assert [(one.state, one.reason) for one in found.trials] == [("complete", "")] * 2
    assert all(one.costs["seconds"] > 0 for one in found.trials)
    notes = answer(found).notes
    assert any(
        note.startswith("no other trial beats these in both, as each was timed once: ") for note in notes
    )
    assert any("any may be the faster one" in note for note in notes)


ALWAYS = """
from vivace.ledger import Ratio
from vivace.sweeping.stacking import child

child.too_large = lambda seconds: ""
child.measured = lambda stack: (Ratio(2.0, 2.0, 2.0), 0.001)
child.rows_at_once = lambda stack: len(stack.rows)
StackedTrials = child.StackedTrials
"""


def always_stacked(folder, monkeypatch):
    """Stacks are faster from here on, whatever else the machine does."""
    (folder / "always_stacked.py").write_text(ALWAYS)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.setattr(runs_module.stack_side, "ENTRY", "always_stacked:StackedTrials")


def _stacked(out, log, resume=False):
    """Two runs of `patient` in one stack."""
    return vivace.sweep(
        f"{JOBS}:patient",
        {"lr": "0.05..0.2", "log": str(log)},
        trials=2,
        seeds=0,
        workers=1,
        against="parameters",  # so that none is pruned
        out=out,
        resume=resume,
    )


def _stacked_apart(out, log, folder):
    runpy.run_path(ZYGOTE)
    always_stacked(Path(folder), pytest.MonkeyPatch())
    _stacked(out, log)


def test_a_stack_that_is_killed_goes_on_from_its_checkpoints(tmp_path, fork_server, monkeypatch):
    """To the last digit: see test_stacking.py."""
    out, log = tmp_path / "out", tmp_path / "log"
    process = fork_server.Process(target=_stacked_apart, args=(str(out), str(log), str(tmp_path)))
    process.start()
    folders = [out / "trials" / f"trial_{number:04d}" for number in range(2)]
    deadline = time.monotonic() + 120
    while not all((folder / "saved.jsonl").exists() for folder in folders):
        assert time.monotonic() < deadline, "no checkpoint was written"
        time.sleep(0.02)
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    assert not psutil.wait_procs(children, timeout=20)[1], "a stack outlives its sweep"
    begun = [json.loads((folder / "saved.jsonl").read_text().splitlines()[-1])["epoch"] for folder in folders]
    assert min(begun) > 1
    log.unlink()
    always_stacked(tmp_path, monkeypatch)
    found = _stacked(out, log, resume=True)
    assert [(trial.state, trial.fused) for trial in found.trials] == [("complete", 2)] * 2
    assert len(log.read_text().splitlines()) == sum(60 - epoch + 1 for epoch in begun)
    for folder in folders:
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        assert [line["epoch"] for line in lines] == list(range(1, 61))


@pytest.mark.parametrize(("fusing", "shaping"), [(True, ["width", "batch", "optimizer"]), (False, ["width"])])
def test_what_runs_of_a_stack_have_in_common_decides_who_shares_one(tmp_path, fusing, shaping):
    """But for a real number: two runs with one clipping are two that the search did not want."""
    function = JobFunction(f"{JOBS}:job")
    told = ["lr=0.01..1", "dropout=0,0.5", "clip=0.5..1", "width=4..8", "batch=16,32", "optimizer=sgd,adam"]
    space, fixed = space_of(told, function.parameters)
    with SweepFolder(tmp_path / "out", resume=False) as folder:
        found = searching._look(Source(function), space, fixed, 1, folder, print, fusing)
    assert found["shaping"] == shaping


def test_data_that_cannot_be_read_is_left_to_the_trials(jobs):
    def data():
        raise OSError("the disk is away")

    broken = dataclasses.replace(jobs.job(), data=data)
    assert kind_of(broken, broken.model()) == ""
    assert kind_of(jobs.job(), broken.model()) != ""


def test_runs_of_each_batch_size_are_stacked(tmp_path, monkeypatch):
    always_stacked(tmp_path, monkeypatch)
    found = vivace.sweep(
        f"{JOBS}:job", ["lr=0.05..0.2", "batch=16,32", "epochs=1"], trials=8, seeds=0, workers=1,
        out=tmp_path / "out",
    )  # fmt: skip
    assert sorted(one["shape"]["batch"] for one in found.fusing) == [16, 32]
    assert all(one["fused"] for one in found.fusing)
    assert [trial.fused for trial in found.trials] == [2] * 8


def test_a_search_of_shapes_comes_to_most_of_them(tmp_path, monkeypatch):
    """Runs of one shape are stacked, and yet sixty trials are no search of one width and one depth."""
    space = {
        "lr": FloatDistribution(1e-4, 0.1, log=True),
        "width": CategoricalDistribution([32, 64, 128]),
        "depth": IntDistribution(2, 6),
    }
    stacks = []

    def fused(runs, together, shape, further):
        stacks.append((shape, len(together) + further))
        for asked in [*together, *runs.alike(shape, further)]:
            away = abs(asked.parameters["depth"] - 4) + abs(asked.parameters["width"] - 64)
            study.complete(asked.number, [-away], metric=-away)

    monkeypatch.setattr(Runs, "_fuse", fused)
    monkeypatch.setattr(Runs, "_try", lambda runs, asked: study.complete(asked.number, [-99.0], metric=-99.0))
    with SweepFolder(tmp_path / "out", resume=False) as folder:
        study = Study(folder.journal, Setting("job", to_dict(space), {}, 0, 1), space)
        given = {"packing": Packing(1, 1), "tell": lambda *_: None, "shaping": ["width", "depth"]}
        Runs(study, folder, Source(JobFunction(f"{JOBS}:job")), Plan(), **given).search(60)
    assert len(study.counted()) == 60
    assert len({shape for shape, _ in stacks}) >= 9
    assert sum(size for _, size in stacks) >= 55


def test_a_stack_goes_on_while_the_search_comes_to_its_shape(tmp_path):
    """Places that stood empty while another shape had its turn are filled again, and no draw is lost."""

    def heard(ended, refused=()):
        rows = [
            {
                "number": number,
                "epoch": 1,
                "metric": 0.5,
                "ended": number in ended,
                "error": None,
                "num_parameters": 1,
                "of_epochs": 2,
            }
            for number in fused._members
            if number not in refused
        ]
        told = {"fused": True, "sameness": "", "alone_step_seconds": 0.001}
        question = {"rows": rows, "seconds": 0.1, "fused": len(rows), "decision": told, "failed": {}}
        answer = fused.heard({**question, "refused": dict.fromkeys(map(str, refused), "it is another")})
        return [one["number"] for one in answer["join"] if one["parameters"]["width"] == 32]

    space = {"lr": FloatDistribution(1e-4, 0.1, log=True), "width": CategoricalDistribution([32, 64])}
    shape, other = (("width", 32),), (("width", 64),)
    with SweepFolder(tmp_path / "out", resume=False) as folder:
        study = Study(folder.journal, Setting("job", to_dict(space), {}, 8, 1), space)
        given = {"packing": Packing(1, 1), "tell": lambda *_: None, "shaping": ["width"]}
        runs = Runs(study, folder, Source(JobFunction(f"{JOBS}:job")), Plan(), **given)
        runs.wanted = 1000
        first, *others = [study.ask({"width": 32}) for _ in range(3)]
        fused, joined = Fused(runs, [first, *others], shape, 2), [one.number for one in others]
        rounds = 0
        while joined := heard(joined):
            rounds += 1
            assert len(joined) == 2
        assert rounds
        assert [runs._shape_of(one) for one in runs._waiting] == [other]
        while not joined:
            runs.alike(other, 1)  # which has had its turn
            joined = heard([])
        assert len(joined) == 2
        fused._left = 10
        fused.draw()
        drawn = [one.number for one in fused._drawn]
        assert len(drawn) == 2
        assert heard([], refused=joined[1:]) == []  # who was refused leaves no place
        assert heard(joined[:1]) == drawn[:1]
        fused.draw()
        drawn = [first.number, drawn[0], *(one.number for one in fused._drawn)]
        assert len(drawn) == 3
        fused.end({"decision": {"fused": True}, "refused": {}, "failed": {}})
        assert {*drawn, joined[1]} <= {one.number for one in runs._waiting}


@pytest.mark.fault(37)
def test_a_pruned_trial_is_not_the_best_of_a_resumed_sweep(tmp_path):
    """Optuna gives it the metric of its last epoch as a value."""
    space = {"lr": FloatDistribution(0.1, 1.0)}
    with SweepFolder(tmp_path / "out", resume=False) as folder:
        study = Study(folder.journal, Setting("job", to_dict(space), {}, 0, 9), space)
        pruned, complete = study.ask().number, study.ask().number
        study.report(pruned, 1, 0.9)
        study.prune(pruned)
        study.complete(complete, [0.8])
        runs = Runs(
            study, folder, Source(JobFunction(f"{JOBS}:job")), Plan(), packing=Packing(1, 1), tell=print
        )
        runs.search(2)
    assert runs.best == (0.8, complete)


TRIVIAL = """
class Trivial:
    def __init__(self, job, threads):
        pass

    def train(self, parameters, plan, out, seed):
        return {"pruned": False, "metric": parameters["lr"], "epoch": 1, "step_seconds": None}
"""


def test_the_parents_memory_stays_over_two_hundred_trials(tmp_path, monkeypatch):
    (tmp_path / "trivial_trial.py").write_text(TRIVIAL)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(runs_module.child_side, "ENTRY", "trivial_trial:Trivial")
    source = Source(JobFunction(f"{JOBS}:job"))
    space = {"lr": FloatDistribution(0.0, 1.0)}
    sizes, me = [], psutil.Process()
    with SweepFolder(tmp_path / "out", resume=False) as folder:
        study = Study(folder.journal, Setting("job", to_dict(space), {}, 0, 1), space)
        monkeypatch.setattr(study._sampler, "begun", RandomSampler)  # what is asked does not matter here
        runs = Runs(
            study,
            folder,
            source,
            Plan(),
            packing=Packing(2, 1),
            tell=lambda kind, told: sizes.append(me.memory_info().rss),
            fusing=False,
        )
        runs.search(200)
        assert len(study.counted()) == len(sizes) == 200
    assert max(sizes[150:]) - max(sizes[:50]) < 16 * 2**20


def test_a_stack_is_heard_while_trials_are_drawn_for_another(tmp_path, monkeypatch):
    space = {"lr": FloatDistribution(0.0, 1.0)}
    with SweepFolder(tmp_path / "out", resume=False) as folder:
        study = Study(folder.journal, Setting("job", to_dict(space), {}, 0, 1), space)
        source = Source(JobFunction(f"{JOBS}:job"))
        runs = Runs(study, folder, source, Plan(), packing=Packing(2, 1), tell=lambda *_: None)
        runs.wanted, drawn, first = 20, [], threading.Event()

        def ask(like):
            drawn.append(like)
            first.set()
            time.sleep(0.02)
            return Asked(len(drawn), {"lr": 0.1})

        monkeypatch.setattr(study, "ask", ask)
        drawing = threading.Thread(target=runs.alike, args=((), 20))
        drawing.start()
        first.wait()
        runs.decided({"fused": True}, (("width", 8),))
        assert len(drawn) < 20
        drawing.join()
        assert len(drawn) == 20


FULL = """
from vivace.errors import FolderError


class Full:
    def __init__(self, job, threads):
        pass

    def train(self, parameters, plan, out, seed):
        raise FolderError("'model.pt' cannot be written: No space left on device")
"""


def test_a_trial_that_meets_a_full_disk_ends_the_sweep_which_says_how_it_goes_on(tmp_path, monkeypatch):
    (tmp_path / "full_trial.py").write_text(FULL)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(runs_module.child_side, "ENTRY", "full_trial:Full")
    with pytest.raises(
        FolderError, match="No space left on device; the sweep stops here, and goes on with --res"
    ):
        vivace.sweep(
            f"{JOBS}:job",
            ["lr=0.1..1"],
            trials=2,
            seeds=0,
            workers=1,
            against="seconds",
            out=tmp_path / "out",
        )


def test_the_folder_of_a_sweep_is_its_own(tmp_path):
    with SweepFolder(tmp_path / "out", resume=False) as folder:
        assert folder.trial(3).name == "trial_0003"
        assert folder.seed(3, 1).parent.name == "seeds"


def test_two_objectives_of_many_trials_have_importances(tmp_path):
    found = vivace.sweep(
        f"{JOBS}:job", ["lr=0.01..1:log", "width=4,8", "epochs=1"], trials=12, seeds=0, workers=2,
        against="parameters", out=tmp_path / "out",
    )  # fmt: skip
    assert len(found.trials) == 12
    assert (tmp_path / "out" / "sweep.html").is_file()


def test_a_resumed_sweep_trains_and_measures_nothing_again(swept, tmp_path, monkeypatch):
    """Where neither a trial nor a seed is left, it is no question how many run at a time."""
    monkeypatch.setattr(packing, "Child", None)
    found, out, _ = swept
    shutil.copytree(out, tmp_path / "out")
    heard = []
    more = vivace.sweep(
        f"{JOBS}:job",
        ["lr=0.01..1:log", "width=4,8", "epochs=3"],
        trials=8,
        seeds=2,
        out=tmp_path / "out",
        resume=True,
        on_event=heard.append,
    )
    assert [one.spread for one in more.finalists] == [one.spread for one in found.finalists]
    assert not [event for event in heard if event.kind == EventKind.SWEPT]
    assert answer(more).next[1].endswith("best.py:job")
    assert answer(dataclasses.replace(more, seed=3)).next[1].endswith("best.py:job --seed 3")
    for one, is_told in ((found, True), (more, False)):
        assert ("trials at a time" in dict(answer(one).facts)) is is_told
        assert "in this session" in dict(answer(one).facts)


def test_other_seeds_are_trained_as_one_and_each_is_the_run_alone(tmp_path, jobs, monkeypatch):
    always_stacked(tmp_path, monkeypatch)
    out, space = tmp_path / "out", {"lr": "0.05..0.2", "dropout": 0.3, "epochs": 2}
    found = vivace.sweep(f"{JOBS}:job", space, trials=2, seeds=2, workers=1, out=out)
    assert [trial.fused for trial in found.trials] == [2, 2]
    folders = list((out / "seeds").iterdir())
    assert len(folders) == 4
    assert not [folder for folder in folders if (folder / "run.json").exists()]
    for one in found.finalists:
        assert set(one.spread.values) == {1, 2}
        for seed, metric in one.spread.values.items():
            own = tmp_path / f"alone_{one.number}_{seed}"
            run = vivace.train(jobs.job(**one.parameters), out=own, seed=seed)
            assert metric == pytest.approx(run.metric, abs=0.02)


def test_a_trial_that_was_part_of_a_stack_can_be_run_alone(tmp_path):
    with SweepFolder(tmp_path / "out", resume=False) as folder:
        stacked, own = folder.trial(3), folder.trial(4)
        lost = folder.trial(5)  # whose checkpoints somebody has removed
        for path, name in ((stacked, "metrics.jsonl"), (own, "plan.toml"), (lost, "plan.toml")):
            path.mkdir()
            (path / name).write_text("")
        (own / "checkpoints").mkdir()
        assert folder.alone(stacked) == stacked
        assert not stacked.exists()
        assert (folder.alone(own) / "plan.toml").exists()
        assert not folder.alone(lost).exists()


def test_values_that_do_not_go_together_fail_alone(jobs, tmp_path):
    """Heads that do not divide a width: each fits with another one."""
    heard = []
    found = vivace.sweep(
        f"{JOBS}:headed",
        ["width=4,6", "heads=2,3"],
        trials=4,
        seeds=0,
        workers=1,
        out=tmp_path / "out",
        on_event=lambda event: heard.append(event.payload),
    )
    assert [one.parameters for one in found.failed] == [{"width": 4, "heads": 3}]
    assert len(found.complete) == 3
    assert any("heads=3" in told.get("text", "") and "goes on" in told["text"] for told in heard)


def test_gpus_that_trials_leave_idle_are_named():
    def beside(*kinds):
        return Machine(tuple(Device(kind, "a device", 2**34) for kind in kinds), 2, {}, {})

    assert searching._idle_gpus(beside("cpu")) == searching._idle_gpus(beside("cuda", "cpu")) == ""
    assert "the first of 2 GPUs" in searching._idle_gpus(beside("cuda", "cuda", "cpu"))
    assert searching._idle_gpus(beside("cpu", "cuda", "cuda")) == ""  # which torch cannot use
