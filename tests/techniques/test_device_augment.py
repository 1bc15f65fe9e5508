from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import FakeData

from vivace import registry
from vivace.engine.opening import start
from vivace.engine.order import ordered
from vivace.errors import PlanError, Refused
from vivace.inspect import inspect
from vivace.job import Job
from vivace.ledger import Observation
from vivace.plan import Plan
from vivace.technique import Numerics
from vivace.testing import TINY_JOBS, TechniqueContract

DeviceAugment = registry.find("device_augment")
STEPS = (
    transforms.RandomCrop(12),
    transforms.RandomHorizontalFlip(),
    transforms.ToTensor(),
    transforms.Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)),
)


def loader(*steps):
    return DataLoader(FakeData(32, (3, 16, 16), 4, transforms.Compose(steps)), batch_size=8)


def pictures():
    return Job(
        model=lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(400, 4)),
        data=lambda: loader(*STEPS),
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    )


class TestDeviceAugment(TechniqueContract):
    technique = DeviceAugment
    jobs: ClassVar = {"mlp": TINY_JOBS["mlp"], "pictures": pictures}


def test_crops_are_the_workers_and_half_of_them_is_flipped_on_the_device():
    plain = [step for step in STEPS if not isinstance(step, transforms.RandomHorizontalFlip)]
    wanted = torch.cat([batch[0] for batch in ordered(loader(*plain), seed=1, epoch=0)])
    with start(pictures(), Plan([DeviceAugment()]), inspect()) as session:
        assert session.promise == Numerics.SEMANTICS
        found = torch.cat(
            [session.place(b)[0] for b in session.batches(ordered(loader(*STEPS), seed=1, epoch=0))]
        )
        seen = Observation({}, {}, 0, 0.0, notes=session.build.notes)
    assert DeviceAugment().confirm(seen, seen) == "RandomHorizontalFlip, ToTensor, Normalize on the device"
    straight = (found == wanted).flatten(1).all(1)
    flipped = (found == wanted.flip(-1)).flatten(1).all(1)
    assert (straight ^ flipped).all()
    assert 4 < int(flipped.sum()) < 28


def test_it_excludes_the_other_way_of_sending_bytes():
    with pytest.raises(PlanError, match="bytes to the device"):
        Plan([DeviceAugment(), registry.find("uint8_transfer")()])


def test_without_bytes_there_is_no_evidence():
    with pytest.raises(Refused, match="no batch of bytes was placed"):
        DeviceAugment().confirm(Observation({}, {}, 0, 0.0), Observation({}, {}, 0, 0.0))
