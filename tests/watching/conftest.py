"""Runs under planted techniques: each is right at first, and trains another model from some step on."""

import dataclasses
import hashlib
import json

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import vivace
from vivace import Card, Numerics, Seam, Stage, Technique
from vivace.testing.jobs import TINY_JOBS

EVERY_STEP = 1e6  # times the run's own time: all steps can be afforded


class Count:
    """How many steps a technique has seen, in checkpoints too."""

    def __init__(self):
        self.steps = 0

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


@pytest.fixture
def plant(register):
    """``(name, apply) -> Plan``: a technique whose ``apply(build, count)`` plants a defect."""

    def planted(apply, roundoff=2.0**-8, numerics=Numerics.ROUNDING):
        def act(self, build):
            count = Count()
            build.keep(count)

            def update(following):
                count.steps += 1
                following()

            apply(build, count)
            build.wrap(Seam.UPDATE, update)

        card = Card(Stage.OPTIMIZER, numerics, "planted", "https://localhost", unit_roundoff=roundoff)
        body = {"card": card, "name": "planted", "apply": act, "__annotations__": {}}
        technique = dataclasses.dataclass(frozen=True)(type("Planted", (Technique,), body))
        register(technique)
        return vivace.Plan([technique()])

    return planted


@pytest.fixture
def watched(tmp_path):
    """``(job, plan, **more) -> Run``: train with every step watched; one run after another in one folder."""

    def train(job, plan, out="run", watch=EVERY_STEP, **more):
        return vivace.train(job, plan, out=tmp_path / out, watch=watch, **more)

    return train


@pytest.fixture
def digest():
    return _digest


@pytest.fixture
def lines():
    return _lines


@pytest.fixture
def tiny():
    return _job


@pytest.fixture
def dropping():
    return _dropping


def _digest(path, part=None):
    """sha256 over all tensors of a saved state_dict by key, or of a part of what was saved."""
    found = hashlib.sha256()
    saved = torch.load(path, weights_only=True)
    if part is not None:
        return hashlib.sha256(repr(saved[part]).encode()).hexdigest()
    for name, tensor in sorted(saved.items()):
        found.update(name.encode() + tensor.numpy().tobytes())
    return found.hexdigest()


def _lines(path):
    """The watched steps in a run's log."""
    records = (json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if "watch_kept" in record]


def _job(name, **changes):
    """A tiny job."""
    return dataclasses.replace(TINY_JOBS[name](), **changes)


def _metric(model, batches):
    """A metric, so that there are evaluations."""
    return -sum(float(functional.cross_entropy(model(x), y)) for x, y in batches)


def _dropping(**changes):
    """A multilayer perceptron with dropout, on batches of which the last is smaller."""
    numbers = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(56, 8, generator=numbers), torch.randint(4, (56,), generator=numbers))
    fields = {
        "model": lambda: nn.Sequential(
            nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 4)
        ),
        "data": lambda: DataLoader(data, batch_size=16, shuffle=True),
        "loss": lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        "optimizer": lambda model: torch.optim.SGD(
            model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3
        ),
        "metric": _metric,
    }
    return vivace.Job(**{**fields, **changes})
