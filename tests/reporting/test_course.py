"""Two trainings on one axis of minutes."""

import json
import re
import subprocess
import sys

import pytest

import vivace
from vivace.errors import FolderError
from vivace.reporting.course import Course


def training(folder, points, **facts):
    """A run's folder: seconds and metrics."""
    folder.mkdir()
    lines = [
        {"step": 10 * n, "epoch": n, "loss": 1 / n, "metric": metric, "seconds": seconds}
        for n, (seconds, metric) in enumerate(points, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    known = {"steps": 30, "epochs": 3, "metric": points[-1][1], "seconds": points[-1][0], "loss": 0.1}
    known |= {"metric_name": "accuracy", "metric_data": "validation", "plan": {}, "samples_per_second": 9.0}
    (folder / "run.json").write_text(json.dumps(known | facts))
    return folder


@pytest.fixture
def both(tmp_path):
    reference = training(tmp_path / "strict", [(60, 0.5), (120, 0.8), (180, 0.9)])
    plan = training(tmp_path / "plan", [(30, 0.4), (60, 0.85), (90, 0.92)], plan={"bf16_autocast": {}})
    return reference, plan


def test_both_metrics_stand_on_one_axis_of_minutes(both):
    reference, plan = both
    page = vivace.report(plan, beside=reference).read_text(encoding="utf-8")
    lines = dict(re.findall(r'class="line (\w+)" d="M([^"]+)"', page.partition("Training loss")[0]))
    across = {name: [int(point.split()[0]) for point in line.split("L")] for name, line in lines.items()}
    assert across == {"reference": [200, 600, 1000], "plan": [0, 200, 400]}  # of half a minute to three
    assert '<li><i class="reference"></i>strict fp32</li>' in page
    assert '<li><i class="plan"></i>bf16_autocast</li>' in page
    assert "Accuracy 0.9 after 1 min 30 s; the other training took 3 min." in page
    alone = vivace.report(plan).read_text(encoding="utf-8")
    assert "beside" not in alone
    assert 'class="line reference"' not in alone


def test_the_command_says_what_the_page_says(both):
    reference, plan = both
    command = [sys.executable, "-m", "vivace", "report", str(plan), "--beside", str(reference)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    told = " ".join(told.split())
    assert "1 min 30 s instead of 3 min to train 30 steps" in told
    assert "Accuracy 0.9 after 1 min 30 s; the other training took 3 min." in told
    assert "1 min 30 s instead of 3 min" in (plan / "report.html").read_text(encoding="utf-8")


def test_the_time_is_that_of_a_metric_that_both_reach():
    better = Course("a", (10.0, 20.0, 30.0), (0.2, 0.7, 0.9))
    worse = Course("b", (10.0, 20.0, 30.0), (0.1, 0.6, 0.5))  # better before its end
    assert better.against(worse, "metric") == "metric 0.5 after 20 s; the other training took 20 s"
    assert worse.against(better, "metric") == "metric 0.5 after 20 s; the other training took 20 s"
    assert worse.reached(0.9) is None


def test_a_run_without_a_metric_at_two_times_is_no_other_training(both, train_folder):
    with pytest.raises(FolderError, match="has no metric at two times, so none to draw beside"):
        vivace.report(both[1], beside=train_folder)
    with pytest.raises(FolderError, match="there is no folder"):
        vivace.report(both[1], beside=train_folder / "none")


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"job": "tagger.py:job"}, "trained train.py:job, and the other tagger.py:job: --beside draws two"),
        ({"job": "train.py:job,width=8"}, "and the other train.py:job,width=8: "),
        ({"metric_name": "F1"}, "has accuracy for its metric, and the other F1: "),
        (
            {"metric_data": "training"},
            "has accuracy for its metric, and the other accuracy on the training",
        ),
    ],
)
def test_another_job_or_metric_is_no_other_training(both, tmp_path, other, told):
    facts = {"job": "train.py:job"}
    plan = training(tmp_path / "one", [(30, 0.4), (60, 0.85)], **facts)
    with pytest.raises(FolderError, match=told):
        vivace.report(plan, beside=training(tmp_path / "two", [(60, 0.5), (120, 0.8)], **facts | other))
    moved = training(tmp_path / "moved", [(60, 0.5), (120, 0.8)], job="/home/ann/./train.py")
    assert "1 min instead of 2 min" in vivace.report(plan, beside=moved).read_text(encoding="utf-8")


def test_another_device_is_told(both, tmp_path):
    plan = training(tmp_path / "one", [(30, 0.4), (60, 0.85)], device="an H200")
    page = vivace.report(plan, beside=training(tmp_path / "two", [(60, 0.5), (120, 0.8)], device="a laptop"))
    assert "The other training ran on another device: a laptop" in page.read_text(encoding="utf-8")


def test_a_run_without_times_has_nothing_beside_which_to_draw(both, train_folder):
    """An older run does not say when: its metric is drawn over steps, alone."""
    with pytest.raises(FolderError, match="has no metric at two times"):
        vivace.report(train_folder, beside=both[0])
    assert 'class="line reference"' not in vivace.report(train_folder).read_text(encoding="utf-8")
