import dataclasses
import io
import multiprocessing
import zipfile

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

from vivace.data.order import ordered
from vivace.errors import Refused
from vivace.inspection import inspect
from vivace.ledger import Observation
from vivace.plan import Plan
from vivace.session.opening import start
from vivace.technique import Numerics, registry
from vivace.testing import TINY_JOBS, TechniqueContract, plain_profile

LoaderWorkers = registry.find("loader_workers")
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on one core
MACHINE = dataclasses.replace(inspect(), num_cores=4)


@pytest.mark.usefixtures("one_thread")
class TestLoaderWorkers(TechniqueContract):
    technique = LoaderWorkers


class Numbers(Dataset):
    def __init__(self, noise=False):
        self.noise = noise

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.tensor([float(index)]) + (torch.rand(1) if self.noise else 0)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


class OwnWay(DataLoader):
    def __iter__(self):
        return super().__iter__()


class Filtered(DataLoader):
    """Completes each batch once it is here, as loaders of a graph's neighbours do."""

    def _get_iterator(self):
        return map(torch.Tensor.neg, super()._get_iterator())


class WithEpoch(Numbers):
    def set_epoch(self, epoch): ...


def session_with(**settings):
    return start(TINY_JOBS["mlp"](), Plan([LoaderWorkers(**settings)]), MACHINE)


def read(session, loader):
    return [batch.flatten().tolist() for batch in session.batches(loader)]


@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": 4},
        {"batch_size": 4, "drop_last": True},
        {"batch_size": None},
        {"batch_sampler": BatchSampler(SequentialSampler(range(10)), 3, False)},
        {"batch_size": 2, "collate_fn": lambda samples: torch.cat(samples) * 2},
    ],
)
def test_same_batches_in_the_same_order(arguments):
    loader = DataLoader(Numbers(), **arguments)
    wanted = [batch.flatten().tolist() for batch in loader]
    with session_with(num_workers=1) as session:
        assert read(session, loader) == wanted


def test_same_shuffle_for_the_same_seed():
    loader = DataLoader(Numbers(), batch_size=4, shuffle=True)
    torch.manual_seed(3)
    wanted = [batch.flatten().tolist() for batch in loader]
    with session_with(num_workers=2) as session:
        torch.manual_seed(3)
        assert read(session, loader) == wanted


def test_persistent_workers_live_across_epochs_and_end_with_the_session():
    loader = DataLoader(Numbers(), batch_size=4)
    with session_with(num_workers=2) as session:
        read(session, loader)
        first = {child.pid for child in multiprocessing.active_children()}
        read(session, loader)
        assert {child.pid for child in multiprocessing.active_children()} == first
        assert len(first) == 2
    assert not multiprocessing.active_children()


def test_random_augmentation_raises_the_promise_and_a_fixed_dataset_does_not():
    for noise, promise in ((False, Numerics.EXACT), (True, Numerics.ROUNDING)):
        with session_with(num_workers=1) as session:
            read(session, DataLoader(Numbers(noise), batch_size=4))
            assert session.promise == promise


def test_no_workers_takes_workers_away():
    with session_with(num_workers=0) as session:
        batches = read(session, DataLoader(Numbers(), batch_size=5, num_workers=1, timeout=9))
        assert batches == [[0.0, 1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0, 9.0]]
        assert session.build.notes["loader_workers"] == (1, 0, None)


@pytest.mark.parametrize(
    ("settings", "loader", "reason"),
    [
        ({}, [1, 2], "the data is a list, not a torch DataLoader"),
        ({}, DataLoader(Stream()), "iterable dataset"),
        ({}, OwnWay(Numbers()), "your OwnWay iterates in its own way"),
        ({}, Filtered(Numbers()), "your Filtered iterates in its own way"),
        ({}, DataLoader(WithEpoch()), "persistent = false"),
        ({}, ordered(DataLoader(WithEpoch()), seed=0, epoch=0), "persistent = false"),  # as `train` feeds it
        ({"num_workers": 0}, DataLoader(Numbers()), "already has num_workers = 0"),
        ({"num_workers": 0}, DataLoader(Numbers(), num_workers=1, worker_init_fn=print), "worker_init_fn"),
    ],
)
def test_refuses_where_samples_could_change(settings, loader, reason):
    with session_with(**settings) as session, pytest.raises(Refused, match=f"loader_workers: .*{reason}"):
        session.batches(loader)


def test_an_open_file_that_workers_would_share_is_refused(tmp_path):
    """They would move each other's position in it."""
    path = tmp_path / "numbers.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", "1")

    class InFile(Numbers):
        def __init__(self, file):
            super().__init__()
            self.source = file

    numpy.savez(tmp_path / "numbers.npz", a=numpy.zeros(2))
    arrays = numpy.load(tmp_path / "numbers.npz")
    held = [path.open("rb"), zipfile.ZipFile(path), arrays, io.BytesIO(b"1"), None]
    with session_with() as session:
        for file in held[:3]:
            for loader in (DataLoader(InFile(file)), ordered(DataLoader(InFile(file)), seed=0, epoch=0)):
                with pytest.raises(Refused, match="your dataset's open file 'source'"):
                    session.batches(loader)
            session.batches(DataLoader(InFile(file), worker_init_fn=print))
            file.close()
        for file in held:
            session.batches(DataLoader(InFile(file)))


def test_refuses_more_workers_than_cores():
    with pytest.raises(Refused, match="num_workers = 5, but only 4 cores"):
        session_with(num_workers=5)


def test_proposes_nothing_without_a_data_loader_and_many_workers_where_the_step_waits():
    profile = dataclasses.replace(plain_profile(), device="cuda")
    assert [c.num_workers for c in LoaderWorkers.candidates(profile, MACHINE)] == [4, 2, 1]
    profile.features["loader"] = {"is_dataloader": True, "num_workers": 2}
    profile.shares["data"] = 0.0
    assert [c.num_workers for c in LoaderWorkers.candidates(profile, MACHINE)] == [
        0,
        1,
    ]  # fewer, to free cores
    profile.shares["data"] = 0.6
    profile.features["loader"] = {"is_dataloader": True, "num_workers": 0, "in_memory": True}
    assert LoaderWorkers.candidates(profile, MACHINE) == []
    profile.features["loader"] = {"is_dataloader": True, "num_workers": 0}
    profile.shares["data"] = 0.03  # one core feeds the step
    assert LoaderWorkers.candidates(profile, MACHINE) == []
    profile.features["loader"] = {"is_dataloader": False}
    assert LoaderWorkers.candidates(profile, MACHINE) == []


def test_on_a_cpu_workers_are_offered_beside_the_threads_that_they_leave_and_as_they_are():
    profile = plain_profile()
    profile.features["num_threads"] = 4
    for waiting, order in ((0.2, [1, 2, 4]), (0.8, [2, 4, 1]), (0.95, [4, 2, 1])):
        profile.shares["data"] = waiting
        offered = LoaderWorkers.candidates(profile, MACHINE)
        assert [one.num_workers for one in offered] == order
        left = [{"cpu_threads": {"num_threads": max(1, 4 - n)}} for n in order]
        assert [one.company(profile, MACHINE) for one in offered] == [[beside, {}] for beside in left]
    gpu = dataclasses.replace(profile, device="cuda")
    assert all(one.company(gpu, MACHINE) == [{}] for one in LoaderWorkers.candidates(gpu, MACHINE))


def test_workers_and_the_threads_of_the_step_act_together():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        plan = Plan.from_dict({"loader_workers": {"num_workers": 1}, "cpu_threads": {"num_threads": 2}})
        with start(TINY_JOBS["mlp"](), plan, MACHINE) as session:
            assert read(session, DataLoader(Numbers(), batch_size=5))
            assert torch.get_num_threads() == 2
            seen = Observation({}, {}, 0, 0.0, notes=session.build.notes)
            told = [technique.confirm(seen, seen) for technique in plan.techniques]
        assert told == ["2 threads instead of 3", "1 worker instead of 0"]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
