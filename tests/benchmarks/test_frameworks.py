"""The benchmark of frameworks: converted weights train alike; wrong ones and failures are told."""

import json
import os
import sys
from pathlib import Path

import _evidence
import _frameworks
import _record
import frameworks
import numpy
import pytest

from vivace.advising.software import MEASURED_AS, advise_on_software
from vivace.inspection import inspect

os.environ["KERAS_BACKEND"] = "torch"
STEPS = 2  # one update; more would tell of chaos


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(_frameworks.FOLDER))
    names = ("common", "of_torch", "of_keras")
    yield pytest.importorskip("keras") and [__import__(name) for name in names]
    for name in names:
        sys.modules.pop(name, None)


def losses(module, job, task, arrays, common):
    contender = module.Contender(job, "strict", False, arrays, None)
    return [float(contender.step(contender.batch(*batch))) for batch in common.batches(task)[:STEPS]]


@pytest.mark.parametrize("job", frameworks.JOBS)
def test_converted_weights_train_alike(job, modules):
    common, of_torch, of_keras = modules
    task = common.tasks(quick=True)[job]
    reference = losses(of_torch, job, task, common.weights(task), common)
    noisy = [losses(of_torch, job, task, common.weights(task, seed), common) for seed in range(2)]
    mine = losses(of_keras, job, task, common.weights(task), common)
    assert _frameworks.distance(mine, reference, noisy) <= _frameworks.ALLOWED
    wrong = common.weights(task)
    name = next(name for name in wrong if name.endswith("weight") and wrong[name].ndim > 1)
    wrong[name] = wrong[name][::-1].copy()
    other = losses(of_keras, job, task, wrong, common)
    assert _frameworks.distance(other, reference, noisy) > _frameworks.ALLOWED


def test_a_loss_that_is_no_number_is_far_away():
    assert _frameworks.distance([1.0, float("nan")], [1.0, 1.0], [[1.0, 1.0]]) == float("inf")
    assert _frameworks.distance([1.0, 1.0 + 5e-6], [1.0, 1.0], [[1.0, 1.0 + 1e-6]]) == pytest.approx(
        5.0, 1e-3
    )


def test_samples_held_out_are_others_of_the_same_kind(modules):
    common, of_torch, _ = modules
    for job in frameworks.JOBS:
        task = common.tasks(quick=True)[job]
        trained, held = common.batches(task)[0], common.held_out(task)[0]
        assert trained[0].shape == held[0].shape == (task.batch, *task.shape)
        assert not numpy.array_equal(trained[0], held[0])
        contender = of_torch.Contender(job, "strict", True, common.weights(task), None)
        said = contender.predict(contender.batch(*held))
        assert said.shape == held[1].shape
        assert contender.model.training


class Learning:
    """A contender that knows every class after so many steps, and none before."""

    def __init__(self, after, common):
        self.after, self.steps, self.common = after, 0, common

    def batch(self, inputs, classes):
        return inputs, classes

    def step(self, batch):
        self.steps += 1
        return 0.5

    def predict(self, batch):
        return batch[1] if self.steps >= self.after else batch[1] + 1


@pytest.mark.parametrize(("after", "steps", "reached"), [(1, 5, True), (7, 10, True), (99, 30, False)])
def test_training_ends_at_the_accuracy_or_after_the_most_steps(after, steps, reached, modules):
    common = modules[0]
    worker = __import__("worker")
    sys.modules.pop("worker")
    timed = worker.Timed(Learning(after, common), common.tasks(quick=True)["cnn"], common)
    timed.first()
    found = timed.learn(30, 5, common.ACCURACY)
    assert (found["accuracy_steps"], found["accuracy_seconds"] is not None) == (steps, reached)
    assert found["accuracy"] == float(reached)


@pytest.fixture
def comparison(tmp_path):
    sys.modules.pop("common", None)
    yield frameworks.Comparison(tmp_path / "work", quick=True)
    sys.path.remove(str(_frameworks.FOLDER))


def test_rows_are_kept_and_a_contender_that_fails_has_its_reason(comparison, monkeypatch):
    fails = _frameworks.Contender("nothing", "torch", "keras", "strict", "no_such_backend")
    monkeypatch.setattr(frameworks, "CONTENDERS", [fails])
    monkeypatch.setattr(frameworks, "REFERENCE", fails)
    (row,) = comparison.rows("cnn")
    assert row["status"] == "failed"
    assert "no_such_backend" in row["reason"]
    assert comparison.is_complete("cnn")
    assert not comparison.is_complete("lstm")
    (kept,) = comparison.work.glob("cnn-*.json")
    kept.write_text(json.dumps({"status": "measured", "lines": 1}))
    assert comparison.rows("cnn") == [{"status": "measured", "lines": 1}]


def test_losses_that_are_not_those_of_pytorch_are_never_timed(comparison, monkeypatch):
    losses = {"strict": [[1.0] * 3, [1.0 + 1e-6] * 3]}
    monkeypatch.setattr(comparison, "_losses", lambda job, contender, seeds: losses[contender.setting])
    monkeypatch.setattr(frameworks, "timed", lambda *given: pytest.fail("timed"))
    other = _frameworks.Contender("another", "torch", "torch", "strict")
    assert comparison.envelopes("cnn", other) == 0.0
    comparison._losses = lambda job, contender, seeds: (
        losses["strict"] if contender == frameworks.REFERENCE else [[1.5] * 3]
    )
    monkeypatch.setattr(frameworks, "CONTENDERS", [other])
    (row,) = comparison.rows("cnn")
    assert row["status"] == "failed"
    assert "its losses are not PyTorch's" in row["reason"]


MEASURED = {
    "to_first_step_seconds": 4.0,
    "first_step_seconds": 2.0,
    "compile_seconds": 1.5,
    "accuracy_seconds": None,
    "accuracy_steps": 120,
    "accuracy": 0.5,
    "lines": 50,
    "peak_bytes": 2**30,
    "samples_per_second": 900.0,
    "ratio": {"estimate": 1.5, "low": 1.4, "high": 1.6},
}


class Beside:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def ask(self, command):
        return {}


def test_the_record_is_what_the_guide_and_the_advice_read(tmp_path, monkeypatch):
    monkeypatch.setattr(_record, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(frameworks, "timed", lambda *given: {**MEASURED, "accuracy_seconds": 30.0})
    monkeypatch.setattr(frameworks.Comparison, "envelopes", lambda *given: 2.0)
    monkeypatch.setattr(frameworks.Comparison, "_plan", lambda *given: Path("plan.toml"))
    monkeypatch.setattr(frameworks.Comparison, "_worker", lambda *given: Beside())
    monkeypatch.setattr("sys.argv", ["frameworks", "--work", str(tmp_path / "work")])
    sys.modules.pop("common", None)
    frameworks.main()
    sys.path.remove(str(_frameworks.FOLDER))
    (path,) = (tmp_path / "records").rglob("*.json")
    record = json.loads(path.read_text())
    kinds = {name: entry["kind"] for name, entry in record["work"].items()}
    assert kinds == {name: kind for kind, names in MEASURED_AS.items() for name in names.split()}
    assert all(entry["flops_per_step"] > 1e6 for entry in record["work"].values())
    profile = tmp_path / "profile.json"
    flops = record["work"]["lstm"]["flops_per_step"]
    operators = {"recurrent": {"flops": flops, "bytes": 1e9, "count": 1, "seconds": 1.0}}
    work = {"format": 1, "precision": "fp32", "batch_size": 32, "num_parameters": 10, "operators": operators}
    profile.write_text(json.dumps({"work": work}))
    advice = advise_on_software(str(profile), inspect(), tmp_path / "records")
    assert (advice.answer, advice.record["job"]) == ("stay", "lstm")
    rows = list(_evidence.rows([record], "README.md", "", None))
    assert len(rows) == 1 + len(frameworks.JOBS)
    assert rows[0][1] == "none"
    monkeypatch.syspath_prepend(str(Path(_frameworks.FOLDER).parents[1] / "docs"))
    guide = __import__("frameworks_guide")
    for name in ("frameworks_guide", "gpu_guide"):
        sys.modules.pop(name)
    record["rows"][0] |= {"accuracy_seconds": None}
    record["rows"][1] = {
        **{key: record["rows"][1][key] for key in ("job", "contender", "setting")},
        "status": "failed",
        "reason": "no wheel",
    }
    shown = guide.section(record)
    assert record["date"] in shown
    assert shown.count("1.50x (1.40-1.60)") == len(record["rows"]) - 1
    assert "not in 120 steps" in shown
    assert "PyTorch, compiled, bfloat16: no wheel" in shown
    assert len({line.count("|") for line in shown.splitlines() if line.startswith("|")}) == 1
