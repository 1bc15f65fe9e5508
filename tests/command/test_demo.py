"""The demo's recipe and its last screen."""

import re
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vivace.command import demo as main_job
from vivace.command.demo import JOB, compared
from vivace.events import EventKind
from vivace.job import load
from vivace.ledger import Ratio
from vivace.live.training import train
from vivace.plan import Plan
from vivace.recipes import RECIPES, photographs
from vivace.training.training import Run
from vivace.tuning import tune


def test_no_pixel_that_validates_is_trained_on():
    for picture in photographs.pictures():
        trained = torch.zeros(picture.shape[1], dtype=torch.bool)
        held_out = torch.zeros_like(trained)
        for first in photographs.bands(picture, photographs.TRAINED, 0):
            trained[first : first + photographs.TRAINED] = True
        for first in photographs.bands(picture, photographs.HELD_OUT, photographs.TRAINED):
            held_out[first : first + photographs.HELD_OUT] = True
        assert trained.any()
        assert held_out.any()
        assert not (trained & held_out).any()


def test_crops_come_from_where_they_may():
    crops, labels = next(iter(photographs.data()))
    assert crops.shape == (photographs.BATCH, 1, photographs.SIZE, photographs.SIZE)
    assert labels.unique().numel() > 1
    validated = sum(len(labels) for _, labels in photographs.validation())
    assert validated == RECIPES[JOB].validated
    assert load(JOB).metric_data == "validation"


def test_the_last_screen_compares_both_trainings():
    def run(seconds, metric):
        return Run("", 300, 12, metric, 0.1, seconds, 100.0, None)

    lines = compared(run(90.0, 0.9), run(30.0, None), 100, Ratio(3.1, 2.9, 3.3))
    assert "accuracy 0.900 +- 0.030" in lines[0]
    assert "accuracy not measured" in lines[1]
    assert lines[2].endswith("3.00x as fast")
    assert len(lines) == 3


@pytest.mark.parametrize("seconds", [175.0, 39.0])
def test_the_last_screen_says_where_one_run_each_says_nothing_as_the_machine_was_busy_in_one(seconds):
    def run(seconds):
        return Run("", 300, 12, 0.7, 0.1, seconds, 100.0, None)

    lines = compared(run(seconds), run(46.0), 100, Ratio(1.68, 1.6, 1.8))
    assert lines[-1].startswith("the machine was not alike in both")
    assert lines[-1].endswith("1.68x as fast (1.60-1.80)")


def test_the_last_screen_has_seconds_accuracies_the_model_and_the_page(tmp_path, monkeypatch, capfd):
    """The whole course, of a shorter training; what `tune` measures is given."""
    plan = Plan.from_dict({"channels_last": {}})

    def found(job, out, **settings):
        out.mkdir(parents=True)
        plan.save(out / "plan.toml")
        speedup = Ratio(1.5, 1.4, 1.6)
        return SimpleNamespace(
            interrupted=False,
            plan=plan,
            plan_path=out / "plan.toml",
            speedup=speedup,
            exit_code=0,
            to_dict=dict,
        )

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(main_job, "tune", found)
    monkeypatch.setattr(main_job, "tuned", lambda result, job, console: None)
    monkeypatch.setattr(main_job, "JOB", "digits")  # which trains in seconds
    monkeypatch.setattr(main_job, "train", partial(train, max_steps=60))
    code, documents = main_job.demo(Path("runs"))
    assert code == 0
    assert list(documents) == ["tune", "as_it_is", "plan"]
    assert [documents[name]["steps"] for name in ("as_it_is", "plan")] == [60, 60]
    screen = capfd.readouterr().err.partition("2 of 2")[2]
    assert re.search(r"instead of .* to train 60 steps", screen)
    assert "Same model: " in screen
    assert re.search(r"Page: \S*runs/train/report\.html", screen)
    assert re.search(r"as it is +\S+ \w+ +accuracy \S+ \+- ", screen)
    assert re.search(r"the plan +\S+ \w+ +accuracy \S+ \+- ", screen)
    assert (tmp_path / "runs" / "train" / "report.html").is_file()


def test_where_nothing_is_faster_it_is_trained_as_it_is(tmp_path, monkeypatch, capfd):
    def found(job, out, **settings):
        return SimpleNamespace(interrupted=False, plan=Plan(), exit_code=0, to_dict=dict)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(main_job, "tune", found)
    monkeypatch.setattr(main_job, "tuned", lambda result, job, console: None)
    monkeypatch.setattr(main_job, "JOB", "digits")
    monkeypatch.setattr(main_job, "train", partial(train, max_steps=20))
    code, documents = main_job.demo(Path("runs"))
    assert (code, list(documents)) == (0, ["tune", "as_it_is"])
    assert documents["as_it_is"]["steps"] == 20
    screen = capfd.readouterr().err.partition("2 of 2")[2]
    assert "no plan was found for this machine" in screen
    assert re.search(r"Page: \S*runs/reference/report\.html", screen)


def test_ctrl_c_while_it_tunes_is_answered_in_words(tmp_path, monkeypatch, capfd):
    def interrupted(job, on_event, **settings):
        def listen(event):
            on_event(event)
            if event.payload.get("name") == "searching":
                raise KeyboardInterrupt

        return tune(job, on_event=listen, **settings)

    monkeypatch.setattr(main_job, "tune", interrupted)
    assert main_job.demo(tmp_path)[0] == 130
    told = capfd.readouterr().err
    assert "Interrupted before anything faster was found" in told
    assert "2 of 2" not in told


def test_ctrl_c_while_it_trains_keeps_a_checkpoint_and_says_how_to_go_on(tmp_path, monkeypatch, capfd):
    def found(job, out, **settings):
        out.mkdir(parents=True)
        Plan.from_dict({"channels_last": {}}).save(out / "plan.toml")
        return SimpleNamespace(
            interrupted=False, plan=["channels_last"], plan_path=out / "plan.toml", to_dict=dict
        )

    def interrupted(job, plan, on_event, **settings):
        def listen(event):
            on_event(event)
            if event.kind == EventKind.STEP:
                signal.raise_signal(signal.SIGINT)

        return train(job, plan, on_event=listen, **settings)

    monkeypatch.setattr(main_job, "tune", found)
    monkeypatch.setattr(main_job, "tuned", lambda result, job, console: None)
    monkeypatch.setattr(main_job, "train", interrupted)
    code, documents = main_job.demo(tmp_path)
    assert code == 130
    assert list(documents) == ["tune", "as_it_is"]
    told = capfd.readouterr().err
    assert "--resume" in told
    assert list((tmp_path / "reference" / "checkpoints").glob("step_*"))
    assert not (tmp_path / "train").exists()
