"""A resumed run knows its data again by the first batch, which it reads once more."""

import dataclasses
import functools
import hashlib
import random

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from vivace.data.witness import Witness
from vivace.errors import JobError
from vivace.training.training import train


class Scaled(torch.utils.data.Dataset):
    """The samples of another, times a number, and those that were read."""

    def __init__(self, inner, scale, drawn=False):
        self.inner, self.scale, self.drawn, self.read = inner, scale, drawn, []

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        self.read.append(index)
        noise = random.SystemRandom().random() if self.drawn else 0.0
        inputs, label = self.inner[index]
        return self.scale * inputs + noise, label


class Files(torch.utils.data.Dataset):
    """Tensors in files."""

    def __init__(self, files):
        self.samples = [(str(file), 0) for file in files]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return torch.load(self.samples[index][0])


@pytest.fixture
def of(tiny):
    """``(scale) -> (Job, dataset)``, of the same source."""

    def made(scale, num_workers=0, drawn=False):
        data = Scaled(tiny.Noisy(), scale, drawn)
        loader = functools.partial(
            DataLoader, data, batch_size=tiny.BATCH, shuffle=True, num_workers=num_workers
        )
        return dataclasses.replace(tiny.job, data=loader, metric=None), data

    return made


@pytest.mark.fault(34)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_other_data_are_refused_unless_accepted(tmp_path, of, num_workers):
    job, first = of(1.0, num_workers)
    train(job, out=tmp_path / "run", max_steps=7)
    if not num_workers:
        assert len(first.read) == 7 * 8  # the first batch is marked as it passes
    other, _ = of(1.5, num_workers)
    with pytest.raises(JobError, match=r"the first batch is not what it was\): resume with .* --changed ok"):
        train(other, out=tmp_path / "run", resume=True)
    same, second = of(1.0, num_workers)
    train(same, out=tmp_path / "run", resume=True, max_steps=9)
    if not num_workers:
        assert len(second.read) == (1 + 2) * 8
    train(other, out=tmp_path / "run", resume=True, changed="ok", max_steps=11)
    with pytest.raises(JobError, match="the first batch is not what it was"):
        train(same, out=tmp_path / "run", resume=True)
    assert train(other, out=tmp_path / "run", resume=True).steps == 15


@pytest.mark.parametrize("batches", [(numpy.zeros(3), numpy.ones(3)), (["one text"], ["another"])])
def test_a_first_batch_without_tensors_is_marked_by_what_it_holds(batches):
    marks = []
    for batch in (*batches, batches[0]):
        witness = Witness()
        witness.look(lambda batch=batch: batch)
        marks.append(witness.mark)
    assert marks[0] == marks[2] != marks[1]


def test_data_that_come_otherwise_each_time_prove_nothing(tmp_path, of):
    train(of(1.0, drawn=True)[0], out=tmp_path / "run", max_steps=7)
    assert train(of(1.0, drawn=True)[0], out=tmp_path / "run", resume=True).steps == 15


def test_where_threads_may_move_the_last_bit_nothing_is_compared(tmp_path, of):
    threads = torch.get_num_threads()
    train(of(1.0)[0], out=tmp_path / "run", max_steps=7)
    try:
        torch.set_num_threads(threads + 1)
        assert train(of(1.5)[0], out=tmp_path / "run", resume=True, max_steps=9).steps == 9
    finally:
        torch.set_num_threads(threads)


def test_a_sample_that_was_left_out_is_left_out_of_the_second_reading(tmp_path, tiny):
    """Its file has changed, and can be read."""
    files = [tmp_path / f"{number}.pt" for number in range(16)]
    for number, file in enumerate(files):
        torch.save(torch.full((3,), float(number)), file)
    sums = "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file}\n" for file in files)
    (tmp_path / "SHA256SUMS").write_text(sums)
    torch.save(torch.full((3,), -1.0), files[1])
    job = dataclasses.replace(
        tiny.job,
        model=lambda: torch.nn.Linear(3, 1),
        data=lambda: DataLoader(Files(files), batch_size=8),
        loss=lambda model, batch: model(batch).square().mean(),
        metric=None,
        damaged="skip",
        checksums=str(tmp_path / "SHA256SUMS"),
    )
    train(job, out=tmp_path / "run", max_steps=3)
    assert train(job, out=tmp_path / "run", resume=True, max_steps=5).steps == 5


class Shuffled(torch.utils.data.Sampler):
    """A sampler of the person's own, whose numbers go on from epoch to epoch, or begin anew in each."""

    def __init__(self, size, told):
        self.size, self.told, self.numbers = size, told, random.Random(0)

    def __len__(self):
        return self.size

    def set_epoch(self, epoch):
        if self.told:
            self.numbers = random.Random(epoch)

    def __iter__(self):
        return iter(self.numbers.sample(range(self.size), self.size))


def own_order(tiny, told):
    def data():
        return DataLoader(tiny.Noisy(), batch_size=tiny.BATCH, sampler=Shuffled(tiny.SAMPLES, told))

    return dataclasses.replace(tiny.job, data=data, metric=None)


@pytest.mark.fault(34)
@pytest.mark.parametrize("told", [True, False], ids=["by the epoch", "from epoch to epoch"])
@pytest.mark.parametrize(
    ("steps", "where"),
    [
        (7, "up to batch 2 of epoch 2 the sampler gave another order"),
        (10, "asked again for the order of epoch 2, the sampler gave another one"),
    ],
)
def test_a_sampler_that_gives_another_order_after_a_stop_is_told(told, steps, where, tiny, tmp_path):
    job = own_order(tiny, told)
    train(job, out=tmp_path / "run", max_steps=steps)
    notices = train(job, out=tmp_path / "run", resume=True, max_steps=steps + 2).notices
    if told:
        assert notices == ()
    else:
        (notice,) = notices
        assert f"not bit-exact: {where}" in notice


@pytest.mark.parametrize("told", [True, False])
def test_a_sampler_that_has_been_asked_for_one_epoch_goes_on_after_it(told, tiny, tmp_path, digest):
    job = own_order(tiny, told)
    train(job, out=tmp_path / "whole")
    train(job, out=tmp_path / "run", max_steps=5)
    assert train(job, out=tmp_path / "run", resume=True).notices == ()
    assert digest(tmp_path / "run" / "model.pt") == digest(tmp_path / "whole" / "model.pt")
