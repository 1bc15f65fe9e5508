"""The lines of docs/track.md: each tracker holds the curves of a training, offline."""

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import vivace
from vivace.events import Event, EventKind
from vivace.testing.jobs import TINY_JOBS

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "track.md").read_text(encoding="utf-8")
LINES = dict(re.findall(r"^## (.*?)\n\n```python\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL))

WHOLE = """
from pathlib import Path
import vivace
from vivace.testing.jobs import TINY_JOBS

job, out = TINY_JOBS["mlp"](), Path("train")
"""


@pytest.fixture
def followed(tmp_path, monkeypatch):
    """``followed(tracker)`` runs the page's lines on a tiny job, in a folder of its own; the run's log."""
    monkeypatch.chdir(tmp_path)

    def run(tracker):
        out = tmp_path / "train"
        exec(LINES[tracker], {"vivace": vivace, "job": TINY_JOBS["mlp"](), "out": out})
        return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]

    return run


def test_tensorboard_holds_the_curves(followed, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = followed("TensorBoard")
    events = EventAccumulator(str(tmp_path / "runs" / "curves"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("loss")]
    assert found == [(line["step"], pytest.approx(line["loss"])) for line in log if "loss" in line]


def test_the_log_of_train_itself_calls_the_metric_by_its_name(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    job = dataclasses.replace(TINY_JOBS["mlp"](), metric=lambda model, batches: 0.5, metric_name="accuracy")
    run = vivace.train(job, out=tmp_path / "train")
    events = EventAccumulator(str(tmp_path / "train" / "tensorboard"))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert f"accuracy{' on the training data' if run.metric_data == 'training' else ''}" in tags
    assert "metric" not in tags


def test_wandb_holds_the_curves(tmp_path):
    """In a process of its own: it takes over a whole process."""
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("wandb is not installed")
    (tmp_path / "whole.py").write_text(WHOLE + LINES["Weights & Biases"])
    environment = {**os.environ, "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "whole.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (written,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    log = [json.loads(line) for line in (tmp_path / "train" / "metrics.jsonl").read_text().splitlines()]
    assert b"samples_per_second" in written.read_bytes()
    assert str(log[0]["loss"]).encode()[:8] in written.read_bytes()


@pytest.mark.filterwarnings("ignore")  # the tracker's own
def test_mlflow_holds_the_curves(followed, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    log = followed("MLflow")
    (curve,) = (tmp_path / "mlruns").glob("*/*/metrics/loss")
    steps = [int(line.split()[2]) for line in curve.read_text().splitlines()]
    assert steps == [line["step"] for line in log if "loss" in line]
    assert list((tmp_path / "mlruns").glob("*/*/artifacts/plan.toml"))


def test_mlflow_is_given_names_that_it_takes(tmp_path, monkeypatch):
    given = set()
    tracker = SimpleNamespace(
        log_metrics=lambda scalars, step: given.update(scalars),
        start_run=contextlib.nullcontext,
        log_artifact=lambda path: None,
    )
    monkeypatch.setitem(sys.modules, "mlflow", tracker)
    named = {"metric": lambda model, batches: 0.5, "metric_name": "Spearman's rho (%)"}
    job = dataclasses.replace(TINY_JOBS["mlp"](), **named)
    exec(LINES["MLflow"], {"vivace": vivace, "job": job, "out": tmp_path / "train"})
    assert [name for name in given if name.startswith("Spearman_s rho ___")]
    assert all(re.fullmatch(r"[\w\-. :/]+", name) for name in given)


def test_an_event_of_a_step_has_its_figures_and_others_have_none():
    payload = {"step": 7, "epoch": 1, "loss": 0.5, "metric": 0.9, "metric_name": "accuracy"}
    event = Event(EventKind.EPOCH, payload | {"metric_data": "validation"})
    assert (event.step, event.scalars) == (7, {"epoch": 1, "loss": 0.5, "accuracy": 0.9})
    on_training = Event(EventKind.METRIC, payload | {"metric_data": "training"})
    assert on_training.scalars["accuracy on the training data"] == 0.9
    assert Event(EventKind.CHECKPOINT, {"step": 7, "path": "p", "seconds": 0.1}).scalars == {}
    assert Event(EventKind.PHASE, {"name": "searching"}).step is None
    assert Event(EventKind.STEP, {"step": 1, "loss": None}).scalars == {}


def test_an_exception_of_a_listener_ends_the_training(tmp_path):
    def listener(event):
        if event.kind == EventKind.STEP:
            raise ConnectionError("no network")

    with pytest.raises(ConnectionError):
        vivace.train(TINY_JOBS["mlp"](), out=tmp_path / "train", on_event=listener)
    assert os.listdir(tmp_path) == ["train"]
