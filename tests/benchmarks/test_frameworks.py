"""The benchmark of frameworks: converted weights train alike; wrong ones and failures are told."""

import json
import os
import sys
from itertools import islice

import _frameworks
import frameworks
import pytest

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
    return [float(contender.step(contender.batch(*batch))) for batch in islice(common.batches(task), STEPS)]


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


def test_rows_are_kept_and_a_contender_that_fails_has_its_reason(tmp_path, monkeypatch):
    sys.modules.pop("common", None)
    comparison = frameworks.Comparison(tmp_path / "work", tmp_path / "environments", quick=True)
    sys.path.remove(str(_frameworks.FOLDER))
    fails = _frameworks.Contender("nothing", "torch", "keras", "strict", "no_such_backend")
    row = comparison.row("cnn", fails)
    assert row["status"] == "failed"
    assert "no_such_backend" in row["reason"]
    (kept,) = comparison.work.glob("cnn-*.json")
    kept.write_text(json.dumps({"status": "measured", "lines": 1}))
    assert comparison.row("cnn", fails) == {"status": "measured", "lines": 1}
