"""The limit of loading where workers load, and where it cannot be measured."""

import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import vivace
from vivace.ledger import Profile
from vivace.measuring import loading
from vivace.measuring.worker import Worker

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on one core
SLOW_SECONDS = 0.02


class Slow(Dataset):
    def __init__(self, length=64):
        self.threads, self.length = set(), length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.threads.add(torch.get_num_threads())
        time.sleep(SLOW_SECONDS)
        return torch.ones(8)


class SlowStream(IterableDataset):
    def __iter__(self):
        for _ in range(64):
            time.sleep(SLOW_SECONDS)
            yield torch.ones(8)


class InWorkersOnly(SlowStream):
    def __iter__(self):
        for _ in range(64 // get_worker_info().num_workers):
            time.sleep(SLOW_SECONDS)
            yield torch.ones(8)


class NothingOutside(SlowStream):
    def __iter__(self):
        return super().__iter__() if get_worker_info() else iter(())


class Own(DataLoader):
    def __iter__(self):
        yield from super().__iter__()


def job(data):
    return vivace.Job(
        model=lambda: nn.Linear(8, 1),
        data=data,
        loss=lambda model, batch: model(batch).mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )


def told(data):
    return Worker(job(data), vivace.inspect().to_dict()).profile()["features"]["loading_limit"]


@pytest.mark.parametrize(
    ("steps", "step", "warmup"),
    [
        ([30.0, 25.0, 0.05], 0.05, 54.9),  # the second shape is compiled, too
        ([0.8, 0.6, 0.7], 0.6, 0.3),
        ([5.0, *[0.125] * 8], 0.125, 4.875),
    ],
)
def test_a_slow_second_step_belongs_to_the_warm_up(monkeypatch, steps, step, warmup):
    now, left = [0.0], list(steps)

    def one(self, count, cached=False):
        now[0] += left.pop(0)

    monkeypatch.setattr(Worker, "_steps", one)
    monkeypatch.setattr("vivace.measuring.worker.time.perf_counter", lambda: now[0])
    found = Worker(job(generator), vivace.inspect().to_dict()).warm()
    assert found["step_seconds"] == pytest.approx(step)
    assert found["warmup_seconds"] == pytest.approx(warmup)
    assert not left


def generator():
    for _ in range(64):
        time.sleep(SLOW_SECONDS)
        yield torch.ones(2, 8)


@pytest.mark.parametrize("dataset", [Slow, SlowStream])
def test_workers_are_held_against_what_one_core_loads(dataset):
    text = told(lambda: DataLoader(dataset(), batch_size=2, num_workers=1))
    found = text.split()
    assert text.startswith("a core loads ")
    assert 5 < float(found[3]) <= 1 / SLOW_SECONDS
    assert "no number of workers can feed it" in text or "feed it, and your worker cannot" in text


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (generator, "a generator loads in its own way"),
        (lambda: Own(Slow(), num_workers=1), "your Own iterates in its own way"),
        (lambda: DataLoader(Slow(), num_workers=1, worker_init_fn=print), "acts in workers only"),
        (lambda: DataLoader(InWorkersOnly(), num_workers=1), "fails with AttributeError: 'NoneType'"),
        (lambda: DataLoader(NothingOutside(), num_workers=1), "your NothingOutside gives nothing"),
    ],
)
def test_what_cannot_be_measured_is_said(data, reason):
    text = told(data)
    assert text.startswith("the step waits ")
    assert "of its time for data; what a core loads cannot be measured: " in text
    assert reason in text


@pytest.mark.parametrize("data", [lambda: [torch.ones(2, 8)] * 9, lambda: DataLoader(torch.ones(64, 8))])
def test_where_nothing_waits_and_without_workers_it_is_silent(data):
    with vivace.session.opening.start(job(data), vivace.Plan(), vivace.inspect()) as session:
        profile = Profile("cpu", 0.1, {"data": 0.01}, {}, 9, 0, 10, 10, {})
        assert loading.limit_beside(session, job(data), data(), torch.ones(2, 8), profile) == ""


def test_one_batch_is_enough_and_is_read_on_one_thread():
    dataset = Slow(length=2)
    loader = DataLoader(dataset, batch_size=2, num_workers=2)
    threads = torch.get_num_threads()
    one, reason = loading._loaded_by_one_core(loader, job(lambda: loader))
    assert (reason, dataset.threads, torch.get_num_threads()) == ("", {1}, threads)
    assert 0 < one <= 1 / SLOW_SECONDS


@pytest.mark.parametrize(
    ("workers", "one", "waits", "text"),
    [
        (2, 100, 0.0, "with 6 cores no number of workers can feed it; less work for each sample can"),
        (2, 200, 0.0, "5 cores feed it, and your 2 workers cannot"),
        (1, 999, 0.0, "2 cores feed it, and your worker cannot"),
        (4, 900, 0.02, ""),
        (2, 900, 0.4, "your 2 workers could feed it, and yet it waits 40 % of its time"),
        (4, 900, 0.4, "waits 40 % of its time: they share 6 cores with it"),
    ],
)
def test_words(workers, one, waits, text, monkeypatch):
    monkeypatch.setattr(loading, "usable_cores", lambda: 6)
    profile = Profile("cpu", 0.1, {"data": waits}, {}, 9, 0, 10, 10, {"num_threads": 4})
    found = loading._sentence(one, 1000.0, workers, profile)
    assert found.endswith(text)
    assert bool(found) == bool(text)
    assert not text or found.startswith(f"a core loads {one} samples a second, the step consumes 1,000: ")
