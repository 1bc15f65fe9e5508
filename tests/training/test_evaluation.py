import dataclasses
import itertools
import json
import os
import signal

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from vivace.errors import JobError
from vivace.inspection import inspect
from vivace.pictures import PICTURES, Text
from vivace.plan import Plan
from vivace.session.opening import start
from vivace.training.evaluation import Evaluation
from vivace.training.loop import Loop
from vivace.training.resuming import measure_alike
from vivace.training.training import train


@pytest.fixture
def session(tiny):
    with start(tiny.job, Plan(), inspect()) as found:
        yield found


def test_the_plan_feeds_the_metric(tiny, session):
    evaluation, fed = Evaluation(tiny.job, session, 0), []
    plain = evaluation.metric()

    def counted(loader):
        for batch in loader:
            fed.append(batch)
            torch.rand(1)  # what feeding draws is not the metric's
            yield batch

    with session.seams.observed(validation=lambda _, loader: counted(loader)):
        assert evaluation.metric() == plain
    assert len(fed) == tiny.STEPS_AN_EPOCH
    assert evaluation.left_alone() == {}


def test_what_the_plan_leaves_alone_is_told_once(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(Evaluation, "left_alone", lambda self: {"decoded_cache": "it has no pictures"})
    run = train(tiny.job, out=tmp_path / "run")
    assert run.notices == ("decoded_cache leaves the validation data as they are: it has no pictures",)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), torch.tensor(float("nan"))])
def test_a_metric_that_is_no_number_is_an_error_by_its_name(tiny, session, value):
    job = dataclasses.replace(tiny.job, metric=lambda model, batches: value, metric_name="accuracy")
    with pytest.raises(JobError, match=r"^the Job's accuracy is (nan|inf); it must be a finite number$"):
        Evaluation(job, session, 0).metric()


def shown(model, batches):
    assert not model.training
    assert not torch.is_grad_enabled()
    return {"Seen": [Text(f"{len(list(batches))} batches", [str(torch.rand(1).item())])]}


def test_pictures_are_of_the_data_that_the_metric_is_of_and_leave_no_trace(tiny, session):
    job = dataclasses.replace(tiny.job, pictures=shown)
    evaluation = Evaluation(job, session, 0)
    before = torch.random.get_rng_state()
    first = evaluation.pictures()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert first == evaluation.pictures()
    assert first["headings"][0]["pictures"][0]["title"] == f"{tiny.STEPS_AN_EPOCH} batches"


def test_a_run_that_ends_keeps_its_pictures_and_one_that_begins_anew_loses_them(tiny, tmp_path):
    job = dataclasses.replace(tiny.job, pictures=shown)
    run = train(job, out=tmp_path / "run")
    assert run.notices == ()
    assert json.loads((tmp_path / "run" / PICTURES).read_text())["headings"][0]["heading"] == "Seen"
    train(tiny.job, out=tmp_path / "run", restart=True)
    assert not (tmp_path / "run" / PICTURES).exists()


def test_a_run_that_goes_on_after_its_end_and_is_stopped_leaves_nothing_of_that_end(tiny, tmp_path):
    def loss(model, batch):
        if next(steps) == stop_in:
            os.kill(os.getpid(), signal.SIGTERM)
        return tiny.loss(model, batch)

    job, out, stop_in = tiny.make(loss=loss, pictures=shown), tmp_path / "run", None
    names = ("model.pt", PICTURES)
    steps = itertools.count(1)
    train(job, out=out, max_steps=3)
    assert all((out / name).exists() for name in names)
    steps, stop_in = itertools.count(1), 2
    assert train(job, out=out, resume=True).interrupted_by == "SIGTERM"
    assert not any((out / name).exists() for name in names)
    stop_in = None
    train(job, out=out, resume=True)
    assert all((out / name).exists() for name in names)
    train(job, out=out, resume=True)
    assert all((out / name).exists() for name in names)


def test_the_model_is_kept_before_anything_draws(tiny, tmp_path):
    there = []

    def drawn(model, batches):
        there.append((tmp_path / "run" / "model.pt").exists())
        return {}

    train(dataclasses.replace(tiny.job, pictures=drawn), out=tmp_path / "run")
    assert there == [True]


def test_pictures_change_no_bit_of_the_training(tiny, tmp_path, digest):
    train(tiny.job, out=tmp_path / "without")
    train(dataclasses.replace(tiny.job, pictures=shown), out=tmp_path / "with")
    assert digest(tmp_path / "without" / "model.pt") == digest(tmp_path / "with" / "model.pt")


@pytest.mark.parametrize(
    ("pictures", "said"),
    [
        (
            lambda model, batches: 1 / 0,
            "the run has no pictures: the Job's pictures failed: ZeroDivisionError",
        ),
        (lambda model, batches: ["a"], "the run has no pictures: the Job's pictures returned a list"),
    ],
)
def test_a_run_whose_pictures_cannot_be_drawn_says_so_and_ends(tiny, tmp_path, pictures, said):
    run = train(dataclasses.replace(tiny.job, pictures=pictures), out=tmp_path / "run")
    (notice,) = run.notices
    assert notice.startswith(said)
    assert (tmp_path / "run" / "model.pt").exists()
    assert not (tmp_path / "run" / PICTURES).exists()


def test_an_evaluation_is_left_when_the_run_is_asked_to_stop_and_comes_first_when_it_goes_on(
    tiny, tmp_path, digest
):
    """A long one would outlast the grace that a scheduler gives, and cost the steps since the last save."""
    read = []

    def metric(model, batches):
        for number, _ in enumerate(batches):
            read.append(number)
            if len(read) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
        return 1.0

    job, out = tiny.make(metric=metric), tmp_path / "run"
    run = train(job, out=out)
    assert (run.interrupted_by, run.steps, run.metric) == ("SIGTERM", tiny.STEPS_AN_EPOCH, None)
    assert read == [0, 1]
    run = train(job, out=out, resume=True)
    assert (run.resumed_from_step, run.steps, run.metric) == (tiny.STEPS_AN_EPOCH, tiny.STEPS, 1.0)
    train(tiny.make(metric=lambda model, batches: 1.0), out=tmp_path / "whole")
    assert digest(out / "model.pt") == digest(tmp_path / "whole" / "model.pt")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines if "epoch" in line and "metric" in line] == [1, 2, 3]


def test_an_evaluation_does_not_outlast_the_deadline(tiny, tmp_path, monkeypatch):
    over = []
    monkeypatch.setattr(Loop, "_is_nearly_over", lambda self: bool(over))

    def metric(model, batches):
        try:
            return float(sum(1 for _ in batches if not over.append(0)))
        except Exception:
            return 0.0

    run = train(tiny.make(metric=metric), out=tmp_path / "run")
    assert (run.interrupted_by, run.steps, run.metric) == ("deadline", tiny.STEPS_AN_EPOCH, None)


@pytest.mark.parametrize(
    "change", [{"metric_name": "recall"}, {"validation": lambda: DataLoader(Partly(20), batch_size=5)}, {}]
)
def test_a_metric_that_has_changed_is_measured_anew_where_the_run_goes_on(tiny, tmp_path, change):
    train(tiny.make(metric=lambda model, batches: 0.25), out=tmp_path / "run")
    job = tiny.make(metric=lambda model, batches: 0.75, **change)
    run = train(job, out=tmp_path / "run", resume=True)
    assert run.metric == (0.75 if change else 0.25)


def test_a_metric_is_another_one_where_the_jobs_source_is():
    then = {"course": {"source of job.py": "a"}, "metric_of": ["recall", None]}
    assert measure_alike(then, then)
    assert not measure_alike(then, {**then, "course": {"source of job.py": "b"}})
    assert measure_alike({"course": then["course"]}, then)  # of an earlier version


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_sampler_that_gives_one_rank_a_part_of_the_validation_data_is_refused(
    tiny, session, monkeypatch, num_ranks
):
    def validation():
        data = Partly(20)
        return DataLoader(data, 5, sampler=DistributedSampler(data, num_replicas=2, rank=0))

    job = tiny.make(validation=validation, metric=lambda model, batches: sum(len(b[0]) for b in batches))
    monkeypatch.setenv("WORLD_SIZE", str(num_ranks))
    if num_ranks == 1:
        assert Evaluation(job, session, 0).metric() == 10
        return
    with pytest.raises(JobError, match="the validation's DistributedSampler gives each rank a part"):
        Evaluation(job, session, 0).metric()


class Partly(torch.utils.data.Dataset):
    """Twenty samples, of which those from `bad` on cannot be read."""

    def __init__(self, bad):
        self.bad = bad

    def __len__(self):
        return 20

    def __getitem__(self, index):
        if index >= self.bad:
            raise OSError("image file is truncated")
        return torch.full((6,), index / 20), index % 3


def test_damaged_samples_of_the_validation_data_are_told(tiny, tmp_path):
    job = tiny.make(validation=lambda: DataLoader(Partly(18), batch_size=4), damaged="skip")
    run = train(job, out=tmp_path / "run")
    assert run.damaged == ()
    assert run.notices[-1].startswith("in the validation data 2 damaged samples were skipped: 18: OSError: ")
    lines = (tmp_path / "run" / "damaged_validation.jsonl").read_text().splitlines()
    assert {json.loads(line)["index"] for line in lines} == {18, 19}
    assert train(tiny.make(), out=tmp_path / "run", restart=True).notices == ()
    assert not (tmp_path / "run" / "damaged_validation.jsonl").exists()


@pytest.mark.parametrize("readable", [0, 5])
def test_a_metric_of_the_few_samples_that_are_left_is_an_error(tiny, tmp_path, readable):
    job = tiny.make(validation=lambda: DataLoader(Partly(readable), batch_size=5), damaged="skip")
    with pytest.raises(JobError, match=f"^{20 - readable} of 20 samples could not be read, .*step_5 in"):
        train(job, out=tmp_path / "run")
