import contextlib
import multiprocessing
import os
import random
import signal
import time
from functools import partial
from types import SimpleNamespace

import numpy
import psutil
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from vivace.data.order import isolated, ordered
from vivace.errors import JobError
from vivace.session.opening import fed, seed_everything
from vivace.tensors.loaders import with_workers
from vivace.tensors.randomness import capture, same_host_state

SAMPLES = 22


class Noisy(Dataset):
    """Sample i is i plus noise from all three streams that augmentation uses."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        self.read.append(index)
        noise = torch.rand(()) + random.random() + float(numpy.random.rand())
        return torch.tensor(float(index)) + 0.1 * noise


class Counting(IterableDataset):
    def __iter__(self):
        return iter([torch.tensor(n) + torch.rand(()) for n in range(SAMPLES)])


class Endless:
    """A batch sampler of a person's own: draws from the main stream, and never ends."""

    def __iter__(self):
        while True:
            yield torch.randint(SAMPLES, (4,)).tolist()


def noisy_collate(samples):
    return torch.stack(samples) * (1 + torch.rand(()))


def open_file(worker):
    get_worker_info().dataset.file = worker + 7


def read(loader, count=None, **options):
    found = iter(ordered(loader, **{"seed": 3, "epoch": 1, **options}))
    return [next(found) for _ in range(count)] if count else list(found)


def same(left, right):
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


LOADERS = {
    "shuffled": lambda **k: DataLoader(Noisy(), batch_size=4, shuffle=True, **k),
    "sequential": lambda **k: DataLoader(Noisy(), batch_size=4, drop_last=True, **k),
    "weighted": lambda **k: DataLoader(
        Noisy(), batch_size=4, sampler=WeightedRandomSampler(torch.ones(SAMPLES), 18), **k
    ),
    "own generator": lambda **k: DataLoader(
        Noisy(),
        batch_size=4,
        sampler=torch.utils.data.RandomSampler(range(SAMPLES), True, 9, torch.Generator()),
        **k,
    ),
    "batch sampler": lambda **k: DataLoader(
        Noisy(), batch_sampler=BatchSampler(SequentialSampler(range(10)), 3, True), **k
    ),
    "single": lambda **k: DataLoader(Noisy(), batch_size=None, shuffle=True, **k),
    "random collate": lambda **k: DataLoader(Noisy(), batch_size=4, collate_fn=noisy_collate, **k),
}


@pytest.mark.parametrize("name", LOADERS)
def test_an_epoch_depends_on_seed_and_epoch_alone(name):
    loader = LOADERS[name]()
    first = read(loader)
    torch.rand(3)
    random.random()
    assert same(first, read(LOADERS[name]()))
    assert not same(first, read(loader, epoch=2))
    assert not same(first, read(loader, seed=4))


@pytest.mark.parametrize("name", LOADERS)
def test_a_later_start_gives_the_rest(name):
    whole = read(LOADERS[name]())
    for start in (1, len(whole) - 1, len(whole)):
        assert same(whole[start:], read(LOADERS[name](), start_batch=start))


def test_skipped_samples_are_not_loaded():
    loader = LOADERS["shuffled"]()
    assert len(read(loader, start_batch=4)) == 2
    assert len(loader.dataset.read) == SAMPLES - 16


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on one core
def test_worker_processes_change_nothing():
    for name in ("shuffled", "random collate"):
        assert same(read(LOADERS[name]()), read(LOADERS[name](num_workers=2)))


def test_persistent_workers_live_on_over_epochs():
    plain = LOADERS["shuffled"]()
    loader = ordered(LOADERS["shuffled"](num_workers=1, persistent_workers=True), seed=3, epoch=0)
    workers = []
    for epoch in (0, 1):
        assert same(read(plain, epoch=epoch), read(loader, epoch=epoch))
        workers.append([worker.pid for worker in loader._iterator._workers])
    assert workers[0] == workers[1]
    del loader


def test_a_rebuilt_loader_keeps_the_order():
    loader = ordered(LOADERS["shuffled"](), seed=3, epoch=0)
    rebuilt = with_workers(loader, 1, 2, False)
    for epoch in (0, 1):
        ordered(loader, seed=3, epoch=epoch, start_batch=2)
        assert same(list(rebuilt), read(LOADERS["shuffled"](), epoch=epoch, start_batch=2))


def test_the_main_streams_are_untouched():
    for make in (*LOADERS.values(), lambda: DataLoader(Counting(), batch_size=4), lambda: [torch.rand(2)]):
        loader = make()
        torch.manual_seed(0), random.seed(0), numpy.random.seed(0)
        before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
        read(loader)
        assert torch.equal(before[0], torch.get_rng_state())
        assert before[1:] == (random.getstate(), numpy.random.get_state()[1].tolist())


def test_an_endless_sampler_is_read_lazily():
    loader = DataLoader(Noisy(), batch_sampler=Endless())
    assert same(read(loader, 6)[2:], read(loader, 4, start_batch=2))


def test_the_loader_stays_a_loader():
    loader = LOADERS["sequential"]()
    found = ordered(loader, seed=0, epoch=0, start_batch=2)
    assert isinstance(found, DataLoader)
    assert len(found) == len(loader) - 2


def test_other_iterables_are_seeded_and_skipped():
    def draw():
        return (torch.rand(2) for _ in range(5))

    whole = read(draw())
    assert same(whole[3:], read(draw(), start_batch=3))
    assert same(
        read(DataLoader(Counting(), batch_size=4))[2:],
        read(DataLoader(Counting(), batch_size=4), start_batch=2),
    )


def test_a_worker_sees_the_persons_dataset():
    class Opened(Noisy):
        def __getitem__(self, index):
            return self.file

    loader = DataLoader(Opened(), batch_size=2, num_workers=1, worker_init_fn=open_file)
    assert read(loader)[0].tolist() == [7, 7]


def test_isolated_draws_go_on_between_items():
    def draw():
        yield torch.rand(1)
        yield torch.rand(1)

    first, second = isolated(draw, 5)
    assert not torch.equal(first, second)
    assert same([first, second], list(isolated(draw, 5)))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_that_starts_after_its_parent_died_ends(method, tmp_path):
    there, go = tmp_path / "there", tmp_path / "go"
    parent = multiprocessing.get_context("fork").Process(target=read_slowly, args=(method, there, go))
    parent.start()
    while not there.exists() and parent.is_alive():
        time.sleep(0.01)
    worker = psutil.Process(int(there.read_text()))
    parent.kill()
    parent.join()
    go.touch()
    end = time.monotonic() + 300.0
    with contextlib.suppress(psutil.NoSuchProcess):
        while worker.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > end:
                worker.kill()
                pytest.fail("a worker without a parent goes on")
            time.sleep(0.01)


def read_slowly(method, there, go):
    start = partial(start_slowly, there, go)
    read(DataLoader(range(4), num_workers=1, worker_init_fn=start, multiprocessing_context=method))


def start_slowly(there, go, worker):
    there.with_suffix(".part").write_text(str(os.getpid()))
    there.with_suffix(".part").rename(there)
    while not go.exists():
        time.sleep(0.01)


class TestRanks:
    @pytest.mark.parametrize(
        "make", [LOADERS["sequential"], lambda: DataLoader(Counting(), batch_size=4, drop_last=True)]
    )
    def test_ranks_share_every_batch(self, make):
        shares = [read(make(), rank=rank, world_size=2) for rank in range(2)]
        whole = [torch.cat(pair).int() for pair in zip(*shares, strict=True)]
        assert same(whole, [batch.int() for batch in read(make())])

    def test_one_loaded_batch_is_cut(self):
        class Batches(Noisy):
            def __getitem__(self, index):
                return torch.arange(4) + 4 * index

        loader = DataLoader(Batches(), batch_size=None)
        assert read(loader, 2, rank=1, world_size=2)[1].tolist() == [6, 7]

    def test_what_cannot_be_shared_is_refused(self):
        with pytest.raises(JobError, match="a batch of 5 samples cannot be shared by 2 ranks"):
            read(DataLoader(Noisy(), batch_size=5), world_size=2)
        with pytest.raises(JobError, match="a batch of 2 samples cannot be shared by 4 ranks"):
            read(DataLoader(Noisy(), batch_size=4), world_size=4)
        sampler = DistributedSampler(Noisy(), num_replicas=2, rank=0)
        with pytest.raises(JobError, match="DistributedSampler splits the samples"):
            read(DataLoader(Noisy(), batch_size=4, sampler=sampler), world_size=2)


def test_workers_leave_ctrl_c_to_the_main_process():
    class Asking(Noisy):
        def __getitem__(self, index):
            return int(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)

    assert read(DataLoader(Asking(), batch_size=2, num_workers=1))[0].tolist() == [1, 1]


class DrawingLoader:
    """What a technique may put around a loader: it draws when it is made and with each batch."""

    def __init__(self, loader):
        self.loader = loader
        random.random(), numpy.random.rand(), torch.rand(1)

    def __iter__(self):
        for batch in self.loader:
            yield batch + random.random() + float(numpy.random.rand()) + torch.rand(1)


@pytest.mark.parametrize("around", [lambda loader: loader, DrawingLoader])
@pytest.mark.parametrize("make", [lambda: DataLoader(Noisy(), batch_size=4), lambda: [torch.ones(2)] * 3])
def test_what_the_plan_feeds_leaves_the_trainings_streams_alone(around, make):
    session = SimpleNamespace(seams=SimpleNamespace(batches=around))
    passes = []
    for _ in range(2):
        seed_everything(len(passes))
        before, batches = capture(), []
        for batch in fed(session, ordered(make(), seed=3, epoch=0), 7):
            batches.append(batch)
            now = capture()
            assert same_host_state(before, now)
            assert torch.equal(before["torch"], now["torch"])
        passes.append(batches)
    assert all(torch.equal(one, other) for one, other in zip(*passes, strict=True))


class Curriculum(Noisy):
    """A dataset that is told the epoch, as a sampler is."""

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return torch.tensor(100.0 * self.epoch + index)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_is_told_the_epoch(workers):
    loader = DataLoader(Curriculum(), batch_size=SAMPLES, num_workers=workers)
    for epoch in (0, 1, 4):
        (batch,) = ordered(loader, seed=0, epoch=epoch)
        assert int(batch.min()) == 100 * epoch


def test_a_loader_that_completes_its_batches_itself_is_read_as_it_is():
    """Rebuilt from its dataset and functions it would give what its class has not completed."""

    class Completed(DataLoader):
        def _get_iterator(self):
            return (batch * 2 for batch in super()._get_iterator())

    epoch = ordered(Completed(torch.arange(6.0), batch_size=3), seed=0, epoch=0)
    assert [batch.tolist() for batch in epoch] == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]


def test_what_a_dataset_gives_at_once_reaches_the_collate_function_as_it_is():
    """As a TensorDict's loader is written: with a collate function that hands on what the dataset gave."""

    class AtOnce(Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            raise AssertionError("it is asked for all at once")

        def __getitems__(self, indices):
            return {"x": torch.tensor(indices)}

    def as_it_is(batch):
        return batch

    loader = DataLoader(AtOnce(), batch_size=3, collate_fn=as_it_is)
    assert [batch["x"].tolist() for batch in ordered(loader, seed=0, epoch=0)] == [[0, 1, 2], [3, 4, 5]]
