import random

import pytest
import torch
from torch import nn
from torch.nn import functional

import vivace
from vivace.tensors.randomness import capture
from vivace.training.pieces import Unknown, why_not_cut

pytestmark = pytest.mark.usefixtures("one_thread")
SAMPLES = 16


class OwnNorm(nn.Module):
    """A batch normalization that is none of torch's modules."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("variance", torch.ones(8))

    def forward(self, x):
        return functional.batch_norm(x, self.mean, self.variance, training=self.training)


def mean(model, batch):
    return functional.cross_entropy(model(batch["x"]), batch["y"])


def contrastive(model, batch):
    one, other = (functional.normalize(model(x), dim=1) for x in (batch["x"], batch["x"].roll(1, 1)))
    return functional.cross_entropy(one @ other.T / 0.1, torch.arange(len(one)))


def dropped(loss):
    """With masks that no module draws."""
    return lambda model, batch: loss(model, {**batch, "x": functional.dropout(batch["x"], 0.2)})


def weighted(model, batch):
    losses = functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return (losses * batch["weights"]).sum() / batch["weights"].sum()


def penalized(model, batch):
    x = batch["x"].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return gradient.square().sum(1).mean()


def of_all_rows(model, batch):
    return model(batch["x"])[batch["row"]].square().mean()


def crowded(loss, most):
    """Does not fit above so many samples."""

    def of(model, batch):
        if len(batch["x"]) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss(model, batch)

    return of


@pytest.fixture
def why():
    """``(loss, *more of the model) -> str``: why such a job's batch may not be cut in two."""
    sessions = []

    def ask(loss, *more):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), *more, nn.Tanh(), nn.Linear(8, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = vivace.attach(vivace.Plan(), model=model, optimizer=optimizer, loss=loss)
        sessions.append(session)
        batch = {"x": torch.randn(SAMPLES, 6), "y": torch.arange(SAMPLES) % 4, "weights": torch.rand(SAMPLES)}
        batch["row"] = torch.arange(SAMPLES).flip(0)
        before = [tensor.clone() for tensor in model.state_dict().values()]
        streams = capture()
        try:
            return why_not_cut(session, batch, 1)
        finally:
            assert all(map(torch.equal, before, model.state_dict().values()))
            assert torch.equal(capture()["torch"], streams["torch"])
            assert model.training
            assert all(module.training for module in model.modules())

    yield ask
    for session in sessions:
        session.close()


@pytest.mark.parametrize(
    ("loss", "more"),
    [
        (mean, ()),
        (mean, (nn.Dropout(0.5), nn.LayerNorm(8))),
        (dropped(mean), ()),
        (penalized, ()),
        (crowded(mean, 3), ()),
        (lambda model, batch: mean(model, batch) * random.uniform(0.5, 1.5), ()),
    ],
)
def test_a_mean_over_samples_may_be_cut(why, loss, more):
    assert why(loss, *more) == ""


@pytest.mark.parametrize(
    ("loss", "more"),
    [
        (contrastive, ()),
        (contrastive, (nn.Dropout(0.3),)),
        (dropped(contrastive), ()),
        (weighted, ()),
        (crowded(contrastive, 3), ()),
        (mean, (OwnNorm(),)),
        (mean, (OwnNorm(), nn.Dropout(0.5))),
    ],
)
def test_what_looks_at_samples_side_by_side_may_not(why, loss, more):
    assert why(loss, *more).startswith("the loss is no mean over samples: it is ")


def test_a_loss_that_fails_on_a_piece_is_told_as_that(why):
    found = why(of_all_rows)
    assert found.startswith("the loss of a piece of the batch fails (IndexError: index 15 is out of bounds")


def test_where_no_two_samples_fit_it_is_not_known(why):
    with pytest.raises(Unknown, match="no two samples fit into memory"):
        why(crowded(mean, 1))
