"""Opening a job: what is wrong with it is said in the person's words."""

import dataclasses
import functools

import pytest
import torch
from torch import nn

import vivace
from vivace.errors import InputError, JobError
from vivace.inspection import inspect
from vivace.session.opening import call, first_batches, models_of, optimizer_of, parts_of, start
from vivace.testing import TINY_JOBS


def test_a_loader_without_batches():
    assert first_batches(iter([1, 2, 3]), 2) == [1, 2]
    with pytest.raises(JobError, match=r"data\(\) gave no batch: the loader is empty"):
        first_batches([], 2)


def test_a_sentence_of_vivaces_own_is_told_as_it_is():
    """A recipe's data are not there: that is not the job's function failing on a line of its code."""

    def missing():
        raise InputError("AG News is not here: put train.csv there")

    with pytest.raises(JobError, match=r"^AG News is not here: put train\.csv there$"):
        call(dataclasses.replace(TINY_JOBS["mlp"](), data=missing), "data")


def test_models_in_a_dataclass_with_slots_are_found():
    @dataclasses.dataclass(slots=True)
    class Pair:
        one: nn.Module
        other: nn.Module

    pair = Pair(nn.Linear(1, 1), nn.Linear(1, 1))
    assert parts_of(pair, nn.Module) == [pair.one, pair.other]


@pytest.mark.parametrize("kind", ["mlp", "gan"])
def test_what_the_optimizer_trains_and_the_model_does_not_hold_is_refused_before_the_first_step(kind):
    """No checkpoint would keep it, and no ranks would average it."""
    head, job = nn.Linear(4, 3), TINY_JOBS[kind]()

    def beside(built):
        optimizer = torch.optim.SGD([*parts_of(built, nn.Module)[0].parameters(), *head.parameters()], 0.1)
        return optimizer if kind == "mlp" else {**job.optimizer(built), "head": optimizer}

    reason = r"also trains 2 tensors that the model does not hold, such as one of shape \(3, 4\), which"
    with pytest.raises(JobError, match=reason):
        start(dataclasses.replace(job, optimizer=beside), vivace.Plan(), inspect())
    head.requires_grad_(False)
    start(dataclasses.replace(job, optimizer=beside), vivace.Plan(), inspect()).close()


class Temperature:
    """No module, and yet a checkpoint keeps it."""

    def __init__(self):
        self.log = torch.zeros((), requires_grad=True)

    def state_dict(self):
        return {"log": self.log}

    def load_state_dict(self, state):
        self.log.data.copy_(state["log"])


def with_buffer(persistent):
    net = nn.Linear(4, 3)
    net.register_buffer("scale", torch.ones(3).requires_grad_(), persistent)
    return {"net": net}, net.scale


def with_an_object():
    temperature = Temperature()
    return {"net": nn.Linear(4, 3), "temperature": temperature}, temperature.log


def with_a_bare_parameter():
    log_alpha = nn.Parameter(torch.zeros(()))
    return {"net": nn.Linear(4, 3), "log_alpha": log_alpha}, log_alpha


@pytest.mark.parametrize(
    ("make", "kept"),
    [
        (lambda: with_buffer(True), True),
        (lambda: with_buffer(False), False),
        (with_an_object, True),
        (with_a_bare_parameter, False),
    ],
)
def test_what_a_checkpoint_keeps_may_be_trained(make, kept):
    built, weight = make()
    optimizer = torch.optim.SGD([*built["net"].parameters(), weight], 0.1)
    job = dataclasses.replace(TINY_JOBS["gan"](), model=lambda: built, optimizer=lambda _: {"all": optimizer})
    if kept:
        assert optimizer_of(job, built)["all"] is optimizer
    else:
        with pytest.raises(JobError, match="also trains 1 tensor that the model does not hold"):
            optimizer_of(job, built)


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


class Bare(torch.optim.SGD):
    """Forgets gradients without being told how, as optimizers of other libraries do, and counts that."""

    cleared = 0

    def zero_grad(self):
        self.cleared += 1
        super().zero_grad(set_to_none=False)


def test_an_optimizer_whose_zero_grad_takes_no_argument_trains():
    weights, job = [], TINY_JOBS["mlp"]()
    for kind in (Bare, torch.optim.SGD):
        job = dataclasses.replace(job, optimizer=lambda m, kind=kind: kind(m.parameters(), 0.1))
        with start(job, vivace.Plan(), inspect()) as session:
            for batch in job.data():
                session.step(batch)
            weights.append([p.detach() for p in session.model.parameters()])
            assert all(p.grad is None for p in session.model.parameters())
            assert kind is not Bare or session.optimizer.cleared == 4
    assert all(map(torch.equal, *weights))
