"""What a job keeps or draws in Python is the same for reference and plan: it neither hides a defect nor makes
one.
"""

import dataclasses
import itertools
import random
from functools import partial

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import vivace
from vivace import Seam, Stage


class Annealed(nn.Module):
    """Outputs over a temperature that falls with the number of calls."""

    def __init__(self):
        super().__init__()
        self.layers, self.calls = _layers(), 0

    def forward(self, x):
        self.calls += self.training
        return self.layers(x) / (0.5 + 0.05 * self.calls)


class Deep(nn.Module):
    """A block that Python's random numbers leave out of every second step."""

    def __init__(self):
        super().__init__()
        self.first, self.block, self.head = nn.Linear(12, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x):
        x = functional.gelu(self.first(x.flatten(1)))
        if not self.training or random.random() < 0.5:
            x = x + functional.gelu(self.block(x))
        return self.head(x)


class Taught(nn.Module):
    """A teacher that steps move stands in a list, where nobody finds its weights."""

    def __init__(self):
        super().__init__()
        self.layers, self.teacher = _layers(), [_layers().requires_grad_(False)]

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                pairs = zip(self.teacher[0].parameters(), self.layers.parameters(), strict=True)
                for own, other in pairs:
                    own.lerp_(other, 0.1)
        return self.layers(x) + self.teacher[0](x)


def _layers():
    return nn.Sequential(nn.Conv2d(3, 8, 1), nn.GELU(), nn.Flatten(), nn.Linear(32, 4))


def _data():
    numbers = torch.Generator().manual_seed(0)
    images, labels = torch.randn(128, 3, 2, 2, generator=numbers), torch.randint(4, (128,), generator=numbers)
    return DataLoader(TensorDataset(images, labels), batch_size=16)


def _plain(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def _mixed(draw, model, batch):
    share = float(draw(0.4, 0.4))
    outputs = model(share * batch[0] + (1 - share) * batch[0].flip(0))
    parts = (functional.cross_entropy(outputs, labels) for labels in (batch[1], batch[1].flip(0)))
    return share * next(parts) + (1 - share) * next(parts)


def _counted(count, model, batch):
    count["steps"] += 1
    return _plain(model, batch) * (1.0 + 0.05 * count["steps"])


class Warming(torch.optim.SGD):
    """Counts its own steps, up to which the learning rate grows."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.05, momentum=0.9)
        self.count = self.counter()

    def counter(self):
        return 0

    def counted(self):
        self.count += 1
        return self.count

    def step(self, closure=None):
        rate = 0.05 * min(1.0, self.counted() / 100)
        for group in self.param_groups:
            group["lr"] = rate
        return super().step(closure)


class WarmingUnseen(Warming):
    """Its count can be read only by counting on."""

    def counter(self):
        return itertools.count(1)

    def counted(self):
        return next(self.count)


class Around(torch.optim.Optimizer):
    """Steps by another one, whose momentum its own state leaves out."""

    def __init__(self, weights, momentum=0.9):
        super().__init__(weights, {"lr": 0.05})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.05, momentum=momentum)

    def step(self, closure=None):
        self.inner.step()


class AroundNone(Around):
    """The one inside keeps no state."""

    def __init__(self, weights):
        super().__init__(weights, momentum=0)


class AroundOwn(Around):
    """The one inside shares the state of the one around it."""

    def __init__(self, weights):
        super().__init__(weights)
        self.state = self.inner.state


OPTIMIZERS = {
    "warming": Warming,
    "warming_unseen": WarmingUnseen,
    "around": Around,
    "around_none": AroundNone,
    "around_own": AroundOwn,
}


def job(kind):
    model, loss = {
        "annealed": lambda: (Annealed, _plain),
        "deep": lambda: (Deep, _plain),
        "taught": lambda: (Taught, _plain),
        "mixed": lambda: (_layers, partial(_mixed, numpy.random.beta)),
        "mixed_by_its_own": lambda: (_layers, partial(_mixed, numpy.random.default_rng(0).beta)),
        "counted": lambda: (_layers, partial(_counted, {"steps": 0})),
        **dict.fromkeys(OPTIMIZERS, lambda: (_layers, _plain)),
    }[kind]()
    optimizer = OPTIMIZERS.get(kind, partial(torch.optim.SGD, lr=0.05, momentum=0.9))
    return vivace.Job(
        model=model,
        data=_data,
        loss=loss,
        optimizer=lambda model: optimizer(model.parameters()),
    )


KINDS = ["annealed", "deep", "mixed", "mixed_by_its_own", "counted"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_exact_plan_is_bit_identical(kind, ruler_of):
    verdict = ruler_of(job, kind).judge({"optimizer_in_backward": {}})
    assert verdict["kept"], verdict["reason"]
    assert not verdict["reason"]


@pytest.mark.parametrize("kind", [*KINDS, "warming", "around"])
def test_a_right_plan_is_kept_and_a_defect_is_not(kind, ruler_of, planted):
    def scale(build):
        build.wrap(Seam.FORWARD, lambda following, batch: following(batch) * 1.02)

    kept = ruler_of(job, kind).judge({"bf16_autocast": {}})
    assert kept["kept"], kept["reason"]
    assert "random streams differ" not in kept["reason"]
    assert ruler_of(job, kind).judge(planted(scale, Stage.PRECISION))["kept"] is False


def test_pieces_that_draw_from_python_are_compared_by_means(ruler_of):
    verdict = ruler_of(job, "deep").judge({"micro_batches": {}})
    assert verdict["kept"], verdict["reason"]
    assert "random streams differ" in verdict["reason"]


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("taught", "bf16_autocast"),
        ("taught", "optimizer_in_backward"),
        ("warming_unseen", "bf16_autocast"),
    ],
)
def test_a_job_that_does_not_repeat_itself_is_not_judged(kind, plan, ruler_of):
    verdict = ruler_of(job, kind).judge({plan: {}})
    assert verdict["kept"] is None
    assert "the job itself comes out otherwise when it is run again" in verdict["reason"]


def test_nor_is_an_edit_whose_optimizer_steps_by_another_one():
    verdict = vivace.verify(job("around"), against=job("around"), budget=20)
    assert verdict.kept is None
    assert "an optimizer holds another one" in verdict.reason


@pytest.mark.parametrize("kind", ["around_none", "around_own"])
def test_but_one_whose_optimizer_has_the_whole_state_is(kind):
    assert vivace.verify(job(kind), against=job(kind), budget=20).kept


def test_nor_is_an_edit_of_one():
    verdict = vivace.verify(job("warming_unseen"), against=job("warming_unseen"), budget=20)
    assert verdict.kept is None
    assert "the job itself comes out otherwise when it is run again" in verdict.reason


@pytest.mark.parametrize("kind", ["annealed", "mixed", "counted", "warming"])
def test_a_training_is_the_same_as_itself(kind):
    verdict = vivace.verify(job(kind), against=job(kind), budget=20)
    assert verdict.kept, verdict.reason
    assert verdict.promise == "exact"


class Bare(torch.optim.SGD):
    """Forgets gradients without being told how, as optimizers of other libraries do."""

    def zero_grad(self):
        super().zero_grad()


def bare():
    return dataclasses.replace(job("annealed"), optimizer=lambda model: Bare(model.parameters(), lr=0.05))


def test_an_optimizer_whose_zero_grad_takes_no_argument(ruler_of):
    verdict = ruler_of(bare).judge({"bf16_autocast": {}})
    assert verdict["kept"], verdict["reason"]
