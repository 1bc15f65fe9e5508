from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset, default_collate
from torchvision import transforms
from torchvision.datasets import FakeData

from vivace.data.order import ordered
from vivace.errors import PlanError, Refused
from vivace.inspection import inspect
from vivace.job import Job
from vivace.ledger import Observation
from vivace.mechanisms.pixels import _Finish
from vivace.plan import Plan
from vivace.session.opening import start
from vivace.technique import Numerics, registry
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


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on one core
@pytest.mark.parametrize("technique", ["device_augment", "uint8_transfer"])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("first", [(transforms.CenterCrop(12),), STEPS[:2]])
def test_data_for_the_metric_travel_as_bytes_and_stay_bit_for_bit(technique, workers, first):
    travelled = []

    def read(session):
        steps = transforms.Compose([*first, *STEPS[2:]])
        dataset = FakeData(20, (3, 16, 16), 4, steps)
        found = DataLoader(dataset, 8, num_workers=workers, collate_fn=lambda rows: collate(rows, travelled))
        torch.manual_seed(3)
        return [batch[0] for batch in session.validation(ordered(found, seed=1, epoch=0))]

    with start(pictures(), Plan(), inspect()) as session:
        wanted = read(session)
    assert workers or set(travelled) == {torch.float32}
    travelled.clear()
    with start(pictures(), Plan([registry.find(technique)()]), inspect()) as session:
        found = read(session)
        assert session.build.facts.validation_left_alone is None
        assert session.promise == (Numerics.SEMANTICS if technique == "device_augment" else Numerics.EXACT)
    assert workers or travelled[-3:] == [torch.uint8] * 3
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()


def collate(rows, travelled):
    travelled.append(rows[0][0].dtype)
    return default_collate(rows)


def test_data_for_the_metric_without_such_an_end_are_left_alone():
    found = DataLoader(TensorDataset(torch.rand(8, 3, 16, 16)), batch_size=4)
    with start(pictures(), Plan([DeviceAugment()]), inspect()) as session:
        read = [batch[0] for batch in session.validation(found)]
        reason = session.build.facts.validation_left_alone["device_augment"]
    assert reason == "your TensorDataset has no torchvision Compose as its transform"
    assert torch.equal(torch.cat(read), found.dataset.tensors[0])


def test_it_excludes_the_other_way_of_sending_bytes():
    with pytest.raises(PlanError, match="bytes to the device"):
        Plan([DeviceAugment(), registry.find("uint8_transfer")()])


def test_without_bytes_there_is_no_evidence():
    with pytest.raises(Refused, match="no batch of bytes was placed"):
        DeviceAugment().confirm(Observation({}, {}, 0, 0.0), Observation({}, {}, 0, 0.0))


def test_a_film_is_turned_as_a_whole():
    """Of several films, each with as many pictures as there are films."""
    films = torch.arange(4 * 4 * 3 * 2 * 2, dtype=torch.uint8).view(4, 4, 3, 2, 2)
    torch.manual_seed(0)
    turned = _Finish([transforms.RandomHorizontalFlip(0.5)])(films)
    kinds = [
        "turned" if torch.equal(mine, own.flip(-1)) else "as it was" if torch.equal(mine, own) else "mixed"
        for mine, own in zip(turned, films, strict=True)
    ]
    assert set(kinds) == {"turned", "as it was"}
