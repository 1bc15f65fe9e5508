import dataclasses
import json

import pytest
import torch

from vivace.errors import JobError
from vivace.inspection import inspect
from vivace.pictures import PICTURES, Text
from vivace.plan import Plan
from vivace.session.opening import start
from vivace.training.evaluation import Evaluation
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
