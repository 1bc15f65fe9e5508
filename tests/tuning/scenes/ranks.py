"""Jobs for a search on two ranks, and techniques that help, end one rank, and lie."""

import dataclasses
import os
import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import vivace
from vivace import Card, Numerics, Seam, Stage, Technique
from vivace.training import crew

DELAY_SECONDS = 0.03
torch.set_num_threads(1)


def data(num_samples=64):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(num_samples, 8, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs[:, :4].argmax(1)), batch_size=8, shuffle=True)


def loss(model, batch):
    time.sleep(DELAY_SECONDS)
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


job = vivace.Job(
    model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)),
    data=data,
    loss=loss,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    epochs=2,
)
RANK = int(os.environ.get("RANK", "0"))
longer = dataclasses.replace(job, data=lambda: data(64 + 8 * RANK))
normed = dataclasses.replace(
    job, model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))
)


def silent():
    """The same; a rank that gives no answer is given up sooner."""
    crew.GRACE_SECONDS = 8.0
    return job


class Planted(Technique):
    """What the planted techniques share."""

    def confirm(self, seen, reference):
        return "it was planted"

    @classmethod
    def gain(cls, profile, machine):
        return (2.0, 8.0)


def card(summary, numerics=Numerics.EXACT):
    return Card(stage=Stage.MODEL, numerics=numerics, summary=summary, source="tests", unit_roundoff=2.0**-24)


@vivace.register
@dataclasses.dataclass(frozen=True)
class PlantedQuick(Planted):
    """Waits less."""

    name = "planted_quick"
    card = card("waits less")

    def apply(self, build):
        build.set_flag(sys.modules[__name__], "DELAY_SECONDS", 0.004)


@vivace.register
@dataclasses.dataclass(frozen=True)
class PlantedDeath(Planted):
    """Ends one of the two ranks in its first step."""

    name = "planted_death"
    card = card("ends rank 1")

    def apply(self, build):
        build.wrap(Seam.FORWARD, die)


@vivace.register
@dataclasses.dataclass(frozen=True)
class PlantedLie(Planted):
    """Is fast, and trains another model on one of the two ranks."""

    name = "planted_lie"
    card = card("another loss on rank 1", Numerics.ROUNDING)

    def apply(self, build):
        build.set_flag(sys.modules[__name__], "DELAY_SECONDS", 0.001)
        build.wrap(Seam.FORWARD, lambda following, batch: following(batch) * (1 + RANK))


def die(following, batch):
    if RANK == 1:
        os.abort()
    return following(batch)
