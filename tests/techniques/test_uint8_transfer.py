import dataclasses
import gc
import multiprocessing
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import FakeData

import vivace
from vivace.data.order import ordered
from vivace.errors import Refused
from vivace.inspection import inspect
from vivace.job import Job
from vivace.ledger import Observation
from vivace.plan import Plan
from vivace.session.opening import start
from vivace.technique import Numerics, registry
from vivace.testing import TINY_JOBS, TechniqueContract
from vivace.verifying.ruler import Ruler

Uint8Transfer = registry.find("uint8_transfer")


def dataset(*more):
    steps = [transforms.RandomCrop(12), transforms.RandomHorizontalFlip(), transforms.ToTensor(), *more]
    return FakeData(32, (3, 16, 16), 4, transforms.Compose(steps))


NORMALIZE = transforms.Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))


def pictures():
    return Job(
        model=lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(400, 4)),
        data=lambda: DataLoader(dataset(NORMALIZE), batch_size=8, shuffle=True),
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    )


class TestUint8Transfer(TechniqueContract):
    technique = Uint8Transfer
    jobs: ClassVar = {"mlp": TINY_JOBS["mlp"], "pictures": pictures}


@pytest.fixture
def session():
    with start(pictures(), Plan([Uint8Transfer()]), inspect()) as found:
        yield found


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on one core
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("in_order", [False, True])
def test_every_batch_is_bit_for_bit_the_same_and_a_quarter_of_the_bytes(session, workers, in_order):
    def read(loader):
        torch.manual_seed(5)
        return ordered(loader, seed=1, epoch=0) if in_order else loader

    loader = DataLoader(dataset(NORMALIZE), batch_size=8, shuffle=True, num_workers=workers)
    wanted = list(read(loader))
    torch.manual_seed(5)
    sent = list(session.batches(read(loader)))
    for (pixels, labels), (wanted_pixels, wanted_labels) in zip(sent, wanted, strict=True):
        assert pixels.dtype == torch.uint8
        placed = session.place([pixels, labels])
        assert torch.equal(placed[0], wanted_pixels)
        assert placed[0].stride() == wanted_pixels.stride()
        assert torch.equal(placed[1], wanted_labels)
    assert session.promise == Numerics.EXACT


def test_batches_that_came_another_way_stay_as_they_are(session):
    batch = next(iter(DataLoader(dataset(NORMALIZE), batch_size=8)))
    assert session.place(batch)[0] is batch[0]
    list(session.batches(DataLoader(dataset(NORMALIZE), batch_size=8)))
    assert session.place(batch)[0] is batch[0]


@pytest.mark.parametrize("change", [lambda pixels: pixels.float(), lambda pixels: 0.5 * pixels])
def test_a_loop_that_makes_floats_of_the_bytes_is_told_so_before_it_trains(session, change):
    """Such as one that mixes the samples of a batch."""
    loader = DataLoader(dataset(NORMALIZE), batch_size=8)
    before = [p.clone() for p in session.model.parameters()]
    pixels, labels = next(batches := session.batches(loader))
    with pytest.raises(Refused, match=r"^uint8_transfer: your loop changes the batch"):
        session.step([change(pixels), labels])
    assert all(map(torch.equal, before, session.model.parameters()))
    batch, other = next(batches), next(iter(loader))
    session.place(other)  # for a metric of the loop's own, before the step
    session.step(batch)
    session.step(other)
    session.step([next(batches)[0].flip(-1), labels])  # bytes, all the same
    assert all(bool(torch.isfinite(p).all()) for p in session.model.parameters())


def test_floats_of_another_source_are_trained_before_the_bytes_that_wait(session):
    """Such as batches that are replayed."""
    loader = DataLoader(dataset(NORMALIZE), batch_size=8)
    replayed = next(iter(loader))
    for batch in session.batches(loader):
        session.step(replayed)
        session.step(batch)
    assert all(bool(torch.isfinite(p).all()) for p in session.model.parameters())


def test_floats_that_came_in_place_of_the_bytes_with_labels_of_their_own_are_told_at_the_next_batch(session):
    """Such as samples that are mixed, with labels that are."""
    pixels, labels = next(batches := session.batches(DataLoader(dataset(NORMALIZE), batch_size=8)))
    session.step([0.5 * pixels + 0.5 * pixels.flip(0), labels.clone()])
    with pytest.raises(Refused, match=r"^uint8_transfer: your loop changes the batch"):
        next(batches)


def test_the_persons_dataset_is_untouched(session):
    loader = DataLoader(dataset(NORMALIZE), batch_size=8)
    list(session.batches(loader))
    assert loader.dataset[0][0].dtype == torch.float32


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        ([1, 2], "the data is a list, not a torch DataLoader"),
        (DataLoader(range(4)), "your range has no torchvision Compose"),
        (DataLoader(dataset(transforms.RandomErasing())), "RandomErasing comes"),
        (
            DataLoader(
                dataset(NORMALIZE),
                batch_size=4,
                collate_fn=lambda s: torch.stack([a for a, _ in s]).float() * 2,
            ),
            "other numbers",
        ),
    ],
)
def test_what_would_change_is_refused(session, loader, reason):
    with pytest.raises(Refused, match=f"uint8_transfer: .*{reason}"):
        session.batches(loader)


def test_no_bytes_are_no_evidence():
    with pytest.raises(Refused, match="no batch of bytes was placed"):
        Uint8Transfer().confirm(Observation({}, {}, 0, 0.0), Observation({}, {}, 0, 0.0))


def test_it_is_verified_by_what_reaches_the_step():
    ruler = Ruler(pictures(), inspect().to_dict())
    ruler.prepare()
    verdict = ruler.judge(Plan([Uint8Transfer()]).to_dict())
    assert verdict["kept"], verdict["reason"]
    assert verdict["promise"] == "exact"


def test_a_run_has_the_same_metric_and_nothing_to_tell(tmp_path, one_thread):
    def accuracy(model, batches):
        return torch.cat([model(pixels).argmax(1) == labels for pixels, labels in batches]).double().mean()

    made = dataclasses.replace(
        pictures(), metric=accuracy, validation=lambda: DataLoader(dataset(NORMALIZE), batch_size=8), epochs=2
    )
    runs = [vivace.train(made, plan, out=tmp_path / plan.id) for plan in (Plan(), Plan([Uint8Transfer()]))]
    assert runs[0].metric == runs[1].metric
    assert runs[1].notices == ()


@pytest.mark.parametrize("together", [False, True])
def test_two_loaders_are_finished_each_in_its_own_way(session, together):
    ways = NORMALIZE, transforms.Normalize((0.0, 0.0, 0.0), (2.0, 2.0, 2.0))
    data = [FakeData(8, (3, 8, 8), 4, transforms.Compose([transforms.ToTensor(), way])) for way in ways]
    loaders = [DataLoader(one, batch_size=4) for one in data]
    wanted = [next(iter(loader))[0] for loader in loaders]
    passes = [session.batches(loader) for loader in loaders]
    if not together:
        passes = [session.batches(loader) for loader in loaders]  # a later pass over the first one
    for expected, batches in zip(wanted, passes, strict=True):
        assert torch.equal(session.place(next(batches))[0], expected)


def test_batches_of_two_loaders_may_be_read_together_and_be_one(session):
    """Such as those with labels and those without."""
    ways = NORMALIZE, transforms.Normalize((0.0, 0.0, 0.0), (2.0, 2.0, 2.0))
    data = [FakeData(8, (3, 8, 8), 4, transforms.Compose([transforms.ToTensor(), way])) for way in ways]
    loaders = [DataLoader(one, batch_size=4) for one in data]
    wanted = [[images for images, _ in loader] for loader in loaders]
    pairs = zip(*map(session.batches, loaders), strict=True)
    for number, ((images, labels), (others, _)) in enumerate(pairs):
        placed = session.place({"labels": labels, "others": others, "images": images})
        assert torch.equal(placed["images"], wanted[0][number])
        assert torch.equal(placed["others"], wanted[1][number])


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on one core
def test_persistent_workers_end_with_the_session():
    loader = DataLoader(dataset(NORMALIZE), batch_size=16, num_workers=1, persistent_workers=True)
    session = start(pictures(), Plan([Uint8Transfer()]), inspect())
    assert len(list(session.batches(loader))) == 2
    (worker,) = multiprocessing.active_children()
    session.close()
    gc.collect()
    assert worker not in multiprocessing.active_children()


@pytest.mark.parametrize("technique", ["uint8_transfer", "device_augment"])
def test_what_a_loop_changes_in_the_dataset_is_read(technique):
    """Such as another transform for the last epochs."""
    steps = [transforms.RandomVerticalFlip(1.0)] * (technique == "device_augment") + [transforms.ToTensor()]
    own = FakeData(4, (3, 16, 16), 4, transforms.Compose(steps))
    loader = DataLoader(own, batch_size=4)
    with start(pictures(), Plan.from_dict({technique: {}}), inspect()) as session:
        for more in ([], [], [NORMALIZE]):
            own.transform = transforms.Compose([*steps, *more])
            own.transforms.transform = own.transform
            (wanted,) = loader
            (batch,) = session.batches(loader)
            assert batch[0].dtype == torch.uint8
            assert torch.equal(session.place(batch)[0], wanted[0])
        assert session.build.notes[technique]["moved"][-1] == "Normalize"
        assert session.build.notes[technique]["bytes"] == 3 * 4 * 3 * 16 * 16
