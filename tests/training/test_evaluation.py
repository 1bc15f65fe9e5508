import dataclasses

import pytest
import torch

from vivace.errors import JobError
from vivace.inspection import inspect
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
