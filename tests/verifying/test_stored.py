"""Right plans that keep results in 16 bits between products are kept: shadows round what is stored, too."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import vivace
from vivace import Seam, Stage
from vivace.job import Job
from vivace.verifying.halves import Halves
from vivace.verifying.shadow import Rounding

MACHINE = vivace.inspect().to_dict()
USERS, ITEMS = 40, 60


def branches(inputs, weight):
    """The gradient of what a product gives is the sum of those of two branches."""
    hidden = inputs @ weight
    return (functional.relu(hidden) + torch.tanh(hidden)).float().square().mean()


def test_a_gradient_that_two_branches_add_up_is_rounded_where_a_plan_adds_it_in_half():
    inputs, weight = torch.randn(64, 16), torch.randn(16, 32, requires_grad=True)
    with Halves() as halves, torch.autocast("cpu", torch.bfloat16):
        branches(inputs, weight).backward()
    sums = {place: h for place, h in halves.places().items() if place[0].startswith("add") and place[2]}
    assert [(shape, found) for (_, shape, _), found in sums.items()] == [((64, 32), [True])]

    def num_rounded(places):
        rounding, seen = Rounding(2.0**-8, 0, places), []
        rounding._round = lambda tensor: seen.append(tensor.shape) or tensor
        with rounding:
            branches(inputs, weight).backward()
        return seen.count((64, 32))

    assert num_rounded(sums) == num_rounded({}) + 1


class Recommender(nn.Module):
    """Factors of users and items, their products, and a small network on both."""

    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, 16), nn.Embedding(ITEMS, 16)
        self.popular = nn.Embedding(ITEMS, 1)
        self.head = nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, pairs):
        user, item = self.users(pairs[:, 0]), self.items(pairs[:, 1])
        joined = torch.cat((user, item, user * item), 1)
        return (self.head(joined) + self.popular(pairs[:, 1])).squeeze(1) + (user * item).sum(1) / 4


class Machine(nn.Module):
    """A factorisation machine: all products of pairs of factors, from a sum squared and a sum of squares."""

    def __init__(self):
        super().__init__()
        self.factors, self.weights = nn.Embedding(USERS + ITEMS, 8), nn.Embedding(USERS + ITEMS, 1)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, pairs):
        numbers = pairs + torch.tensor([0, USERS])
        factors = self.factors(numbers)
        products = factors.sum(1).square() - factors.square().sum(1)
        return self.bias + self.weights(numbers).sum((1, 2)) + 0.5 * products.sum(1)


def rated():
    numbers = torch.Generator().manual_seed(0)
    users = torch.randint(USERS, (512,), generator=numbers)
    items = torch.randint(ITEMS, (512,), generator=numbers)
    tastes, kinds = (torch.randn(n, 4, generator=numbers) for n in (USERS, ITEMS))
    ratings = torch.tanh((tastes[users] * kinds[items]).sum(1))
    return DataLoader(TensorDataset(torch.stack((users, items), 1), ratings), batch_size=64, shuffle=True)


class Dense(nn.Module):
    """Each layer sees what all before it gave: gradients of several branches meet in every feature map."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        channels = [8, 12, 16, 20]
        self.norms = nn.ModuleList(nn.BatchNorm2d(num) for num in channels)
        self.layers = nn.ModuleList(nn.Conv2d(num, 4, 3, padding=1, bias=False) for num in channels)
        self.last, self.head = nn.BatchNorm2d(24), nn.Linear(24, 4)

    def forward(self, images):
        found = [self.first(images)]
        for norm, layer in zip(self.norms, self.layers, strict=True):
            found.append(layer(functional.relu(norm(torch.cat(found, 1)))))
        return self.head(functional.relu(self.last(torch.cat(found, 1))).mean((2, 3)))


def pictures():
    numbers = torch.Generator().manual_seed(0)
    images = torch.randn(128, 3, 8, 8, generator=numbers)
    return DataLoader(TensorDataset(images, images.mean((2, 3)).argmax(1)), batch_size=16, shuffle=True)


def ratings_job(model):
    return Job(
        model=model,
        data=rated,
        loss=lambda model, batch: functional.mse_loss(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=5e-3),
    )


JOBS = {
    "recommender": ratings_job(Recommender),
    "factorisation_machine": ratings_job(Machine),
    "dense": Job(
        model=Dense,
        data=pictures,
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    ),
}


@pytest.mark.parametrize("plan", ["bf16_weights", "bf16_autocast"])
@pytest.mark.parametrize("job", JOBS)
def test_a_right_plan_is_kept_at_full_effort(job, plan, ruler_of):
    verdict = ruler_of(JOBS.get, job).judge({plan: {}})
    assert verdict["kept"], verdict["reason"]
    assert verdict["bias"]["not_tested"] == ""


def weights_in_half(build):
    def update(following):
        following()
        with torch.no_grad():
            for parameter in build.model.parameters():
                parameter.copy_(parameter.bfloat16())

    build.wrap(Seam.UPDATE, update)


@pytest.mark.parametrize("job", JOBS)
def test_what_is_stored_in_half_does_not_hide_weights_that_are(job, ruler_of, planted):
    plan = planted(weights_in_half, Stage.OPTIMIZER) | {"bf16_weights": {}}
    verdict = ruler_of(JOBS.get, job).judge(plan)
    assert verdict["kept"] is False
