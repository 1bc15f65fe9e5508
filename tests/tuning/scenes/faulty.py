"""A job for a search on two ranks, and techniques of which three fail on rank 1 and one helps.

They run out of memory, hang, and stop its process. A trial of the latter two may take `LIMIT_SECONDS`.
"""

import dataclasses
import os
import signal
import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import vivace
from vivace import Card, Numerics, Seam, Stage, Technique
from vivace.training import verdict
from vivace.tuning.times import Times

DELAY_SECONDS = 0.015
LIMIT_SECONDS = 10.0  # whom the others wait for is known after 5
RANK = int(os.environ.get("RANK", "0"))
torch.set_num_threads(1)


def limit(self, plan, left):
    ends = "planted_crowd" in plan.names or not {"planted_hang", "planted_stop"} & set(plan.names)
    return 60.0 if ends else LIMIT_SECONDS


Times.limit = limit
verdict.SILENT_SECONDS = 4.0  # until it is known that a process is stopped


def data():
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
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


class Planted(Technique):
    """What the planted techniques share; `most` is what one promises, by which they are tried in turn."""

    card = Card(Stage.MODEL, Numerics.EXACT, "planted", "tests")
    most = 0.0

    def apply(self, build):
        build.wrap(Seam.FORWARD, self.forward)

    def forward(self, following, batch):
        if RANK == 1:
            self.fail()
        return following(batch)

    def confirm(self, seen, reference):
        return "it was planted"

    @classmethod
    def gain(cls, profile, machine):
        return (2.0, cls.most)


@vivace.register
@dataclasses.dataclass(frozen=True)
class PlantedCrowd(Planted):
    """Rank 1 runs out of memory in its first step, before any other of these acts."""

    name = "planted_crowd"
    card = dataclasses.replace(Planted.card, stage=Stage.MEMORY)
    most = 50.0

    def fail(self):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@vivace.register
@dataclasses.dataclass(frozen=True)
class PlantedHang(Planted):
    """Rank 1 stands still in its first step."""

    name = "planted_hang"
    most = 30.0

    def fail(self):
        time.sleep(1000)


@vivace.register
@dataclasses.dataclass(frozen=True)
class PlantedQuick(Planted):
    """Waits less."""

    name = "planted_quick"
    most = 40.0

    def apply(self, build):
        build.set_flag(sys.modules[__name__], "DELAY_SECONDS", 0.003)


@vivace.register
@dataclasses.dataclass(frozen=True)
class PlantedStop(Planted):
    """Rank 1's process is stopped in its first step, as from outside."""

    name = "planted_stop"
    most = 20.0

    def fail(self):
        os.kill(os.getpid(), signal.SIGSTOP)
