"""Opening a job: what is wrong with it is said in the person's words."""

import dataclasses
import functools

import pytest
import torch
from torch import nn

import vivace
from vivace.errors import JobError
from vivace.session.opening import call, first_batches, models_of, parts_of
from vivace.testing import TINY_JOBS


def test_a_loader_without_batches():
    assert first_batches(iter([1, 2, 3]), 2) == [1, 2]
    with pytest.raises(JobError, match=r"data\(\) gave no batch: the loader is empty"):
        first_batches([], 2)


def test_models_in_a_dataclass_with_slots_are_found():
    @dataclasses.dataclass(slots=True)
    class Pair:
        one: nn.Module
        other: nn.Module

    pair = Pair(nn.Linear(1, 1), nn.Linear(1, 1))
    assert parts_of(pair, nn.Module) == [pair.one, pair.other]


@pytest.mark.parametrize("layer", [nn.LazyLinear(2), nn.LazyBatchNorm1d(affine=False)])
def test_a_model_whose_shapes_are_not_known_yet_is_named(layer):
    job = TINY_JOBS["mlp"]()
    reason = r"'1\.(weight|running_mean)' has no shape yet, as it is of a lazy layer"
    with pytest.raises(JobError, match=reason):
        models_of(job, nn.Sequential(nn.Flatten(), layer))


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (
            nn.CrossEntropyLoss(),
            r"CrossEntropyLoss\(\) takes outputs and targets: write loss=lambda model, batch: ",
        ),
        (nn.functional.mse_loss, "mse_loss takes outputs and targets"),
        (
            lambda model, images, labels: None,
            r"<lambda> takes \(model, images, labels\): it must take these two",
        ),
    ],
)
def test_a_loss_that_cannot_be_called_with_model_and_batch_is_refused_at_once(loss, reason):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(JobError, match=reason):
        vivace.attach(vivace.Plan(), model=model, optimizer=optimizer, loss=loss)


@pytest.mark.parametrize(
    "function", [lambda outputs, targets, weight: (outputs - targets).mean() * weight, nn.functional.mse_loss]
)
def test_a_loss_whose_decorator_takes_other_arguments_than_its_function_is_taken(function):
    @functools.wraps(function)
    def loss(model, batch):
        return function(model(batch[0]), *batch[1:])

    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    vivace.attach(vivace.Plan(), model=model, optimizer=optimizer, loss=loss).close()


def test_a_function_that_forgot_its_return_is_named():
    job = dataclasses.replace(TINY_JOBS["mlp"](), data=lambda: None)
    with pytest.raises(JobError, match="the Job's data returned None; it must return batches"):
        call(job, "data")
