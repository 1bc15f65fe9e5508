"""A job whose step takes a known time, and techniques that help, crash, hang, lie or change nothing."""

import dataclasses
import fcntl
import os
import sys
import time
from typing import ClassVar

import torch
from torch.utils.data import DataLoader, TensorDataset

import vivace
from vivace import Card, Numerics, Seam, Stage, Technique

DELAY_SECONDS = 0.04
torch.set_num_threads(1)


def data():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 8, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs[:, :4].argmax(1)), batch_size=8, shuffle=True)


def loss(model, batch):
    print("a job may print")
    time.sleep(DELAY_SECONDS)
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def accuracy(model, batches):
    hits = [(model(inputs).argmax(1) == labels).float() for inputs, labels in batches]
    return torch.cat(hits).mean().item()


job = vivace.Job(
    model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)),
    data=data,
    loss=loss,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    metric=accuracy,
    epochs=2,
)


class Planted(Technique):
    """What the planted techniques share."""

    predicted: ClassVar[tuple[float, float]] = (1.0, 2.0)

    def confirm(self, seen, reference):
        return "it was planted"

    @classmethod
    def gain(cls, profile, machine):
        return cls.predicted


def planted(name, numerics=Numerics.EXACT, predicted=(1.0, 2.0), stage=Stage.MODEL):
    """A decorator that registers ``function(build)`` as a technique."""

    def register(function):
        body = {
            "card": Card(
                stage=stage, numerics=numerics, summary=name, source="tests", unit_roundoff=2.0**-24
            ),
            "name": name,
            "predicted": predicted,
            "apply": lambda self, build: function(build),
            "__annotations__": {},
        }
        return vivace.register(dataclasses.dataclass(frozen=True)(type(name, (Planted,), body)))

    return register


@planted("planted_quick", predicted=(2.0, 8.0))
def quick(build):
    build.set_flag(sys.modules[__name__], "DELAY_SECONDS", 0.01)


@planted("planted_crash", predicted=(2.0, 16.0))
def crash(build):
    os.abort()


@planted("planted_wrong", Numerics.ROUNDING, predicted=(3.0, 12.0))
def wrong(build):
    build.set_flag(sys.modules[__name__], "DELAY_SECONDS", 0.002)
    build.wrap(Seam.FORWARD, lambda following, batch: following(batch) * 1.3)


@planted("planted_slow", predicted=(0.9, 1.5))
def slow(build):
    build.wrap(Seam.FORWARD, lambda following, batch: (time.sleep(0.05), following(batch))[1])


@planted("planted_refusal", predicted=(1.0, 1.4))
def refusal(build):
    build.require(False, "it never acts")


@planted("planted_semantics", Numerics.SEMANTICS)
def semantics(build):
    raise AssertionError("it must not even be tried")


def alone_on_the_device():
    """The model, while no other process has one: the device has no memory for two."""
    file = os.open(os.environ["DEVICE"], os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not held:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.") from None
    else:
        held.append(file)
    return job.model()


held = []
large = dataclasses.replace(job, model=alone_on_the_device)
