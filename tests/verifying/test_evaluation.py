"""Models that put out something else in evaluation mode than their loss takes, as detectors do."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vivace
from vivace.machine import Machine
from vivace.plan import Plan
from vivace.session.opening import start
from vivace.testing import jobs
from vivace.verifying.evaluation import Evaluation
from vivace.verifying.ruler import Ruler
from vivace.verifying.states import state_of

MACHINE = vivace.inspect().to_dict()


class Detector(nn.Module):
    """Losses in training, as many boxes as it finds in evaluation."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.2))
        self.head = nn.Linear(8, 10)

    def forward(self, images, labels):
        scores = self.head(self.body(images).mean((2, 3)))
        if self.training:
            return {"classes": F.cross_entropy(scores, labels), "size": scores.square().mean()}
        return [{"boxes": score[score > 0.1]} for score in scores]


def detection():
    return dataclasses.replace(
        jobs.cnn(),
        model=Detector,
        loss=lambda model, batch: sum(model(*batch).values()),
        metric=None,
    )


def test_such_a_job_can_be_verified():
    ruler = Ruler(detection(), MACHINE)
    ruler.prepare(seconds=10)
    verdict = ruler.judge({"bf16_autocast": {}})
    assert verdict["kept"], verdict["reason"]
    assert ruler.evaluation.whole is False


def test_batchnorm_and_dropout_are_evaluated_there_too():
    job = detection()
    with start(job, Plan(), Machine.from_dict(MACHINE)) as session:
        batch = next(iter(job.data()))
        evaluation, state = Evaluation(job, batch), state_of(session)
        outputs = evaluation(session, state)
        model = session.build.model
        assert len(outputs) == 2  # the two losses
        torch.testing.assert_close(outputs, evaluation(session, state), rtol=0, atol=0)
        assert all(torch.equal(state.buffers[name], now) for name, now in state_of(session).buffers.items())
        state.buffers["body.1.running_var"] *= 4
        assert not torch.allclose(outputs, evaluation(session, state))
        assert all(module.training for module in model.modules())


def test_an_error_of_the_loss_itself_is_not_hidden():
    job = dataclasses.replace(jobs.cnn(), loss=lambda model, batch: model(batch[0]).no_such_name)
    with (
        start(jobs.cnn(), Plan(), Machine.from_dict(MACHINE)) as session,
        pytest.raises(AttributeError, match="no_such_name"),
    ):
        Evaluation(job, next(iter(job.data())))(session, state_of(session))


class Outputs(dict):
    """Like transformers' outputs: what is made of nothing holds nothing, and is false."""

    def __init__(self, found):
        super().__init__((key, value) for key, value in found.items() if value is not None)


def test_looking_at_outputs_does_not_replace_them():
    class Naming(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = jobs.cnn().model()

        def forward(self, inputs):
            return Outputs({"logits": self.inner(inputs)})

    job = dataclasses.replace(
        jobs.cnn(),
        model=Naming,
        loss=lambda model, batch: F.cross_entropy(model(batch[0])["logits"], batch[1]),
    )
    with start(job, Plan(), Machine.from_dict(MACHINE)) as session:
        batch = next(iter(job.data()))
        evaluation = Evaluation(job, batch)
        assert len(evaluation(session, state_of(session))) == len(batch[1]) * 4
        assert evaluation.whole
