"""What a training takes beside its steps: evaluations cut short, checkpoints that leave nothing."""

import dataclasses
import itertools
import mmap
import time

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import vivace
from vivace.measuring import beside
from vivace.measuring.beside import evaluation_seconds, saving_seconds, tried_evaluation
from vivace.measuring.worker import Worker
from vivace.plan import Plan
from vivace.session.opening import start
from vivace.tensors.trees import bytes_of, tensors
from vivace.testing.jobs import mlp
from vivace.training.resuming import state_of

NUM_BATCHES = 40
BATCH_SECONDS = 0.01


class Metric:
    """Takes a known time a batch, and counts what it has seen."""

    def __init__(self):
        self.seen = 0

    def __call__(self, model, batches):
        assert not model.training
        for _ in batches:
            self.seen += 1
            time.sleep(BATCH_SECONDS)
        return 1.0


def held_out():
    inputs = torch.randn(4 * NUM_BATCHES, 8)
    return DataLoader(TensorDataset(inputs, inputs[:, 0]), batch_size=4)


def timed(job, seconds):
    with start(job, Plan(), vivace.inspect()) as session:
        found = evaluation_seconds(session, job, seconds)
        assert all(model.training for model in session.build.models)
    return found


@pytest.mark.parametrize(("seconds", "whole"), [(60.0, True), (0.05, False)])
def test_a_long_evaluation_is_cut_short_and_foretold_by_its_length(seconds, whole):
    metric = Metric()
    found = timed(dataclasses.replace(mlp(), metric=metric, validation=held_out), seconds)
    assert (metric.seen == NUM_BATCHES) is whole
    assert metric.seen >= beside.FEWEST_BATCHES
    assert found >= 0.9 * NUM_BATCHES * BATCH_SECONDS


def test_of_validation_data_without_a_length_what_was_seen_counts():
    metric = Metric()
    job = dataclasses.replace(mlp(), metric=metric, validation=lambda: iter(held_out()))
    assert timed(job, 0.05) >= metric.seen * BATCH_SECONDS
    assert metric.seen < NUM_BATCHES


def test_without_a_metric_or_with_one_that_fails_nothing_is_known():
    def failing(model, batches):
        raise ValueError("no class 3 in it")

    assert timed(dataclasses.replace(mlp(), metric=None), 1.0) is None
    assert timed(dataclasses.replace(mlp(), metric=failing, validation=held_out), 1.0) is None


def test_a_metric_that_fails_is_named_unless_it_was_cut_short():
    def failing(model, batches):
        if sum(1 for _ in batches):
            raise ValueError("no class 3 in it")

    job = dataclasses.replace(mlp(), metric=failing, validation=held_out)
    features = Worker(job, vivace.inspect().to_dict()).profile()["features"]
    assert "no class 3 in it" in features["metric_fault"]
    sound = dataclasses.replace(job, metric=lambda model, batches: 1.0)
    assert not Worker(sound, vivace.inspect().to_dict()).profile()["features"]["metric_fault"]
    with start(job, Plan(), vivace.inspect()) as session:
        assert tried_evaluation(session, job, 0.0)[1] == ""


def test_a_checkpoint_is_timed_and_gone(tmp_path, monkeypatch):
    job = mlp()
    with start(job, Plan(), vivace.inspect()) as session:
        checkpoint, end = saving_seconds(session, tmp_path)
        assert 0 < end <= checkpoint
        ticks = itertools.count()
        monkeypatch.setattr(beside.time, "perf_counter", lambda: float(next(ticks)))
        once = saving_seconds(session, tmp_path)[0]
        monkeypatch.setattr(beside, "LARGEST_BYTES", 64)  # so that only a part is written
        sizes = [bytes_of(tensors(state_of(part))) for part in (session.built, session.optimizer)]
        assert saving_seconds(session, tmp_path)[0] == once * sum(sizes) / 64
        assert saving_seconds(session, tmp_path / "gone") == (0.0, 0.0)
    assert list(tmp_path.iterdir()) == []


def test_a_check_says_how_long_the_job_takes_to_start(tmp_path):
    def slow_data():
        time.sleep(0.2)
        return mlp().data()

    job = dataclasses.replace(mlp(), data=slow_data, metric=Metric(), validation=held_out)
    worker = Worker(job, vivace.inspect().to_dict())
    assert worker.check()["start_seconds"] >= 0.2
    features = worker.profile(folder=str(tmp_path))["features"]
    assert features["evaluation_seconds"] >= 0.9 * NUM_BATCHES * BATCH_SECONDS
    assert features["checkpoint_seconds"] >= features["end_seconds"] > 0


def test_page_faults_are_counted_over_the_steps_that_warmed_up():
    """Most steps take no memory anew, every eighth takes 2,048 pages: two steps alone may show none."""
    calls = []

    def loss(model, batch):
        calls.append(1)
        if len(calls) % 8 == 0:
            with mmap.mmap(-1, 2048 * mmap.PAGESIZE) as taken:
                taken.write(bytes(len(taken)))
        return mlp().loss(model, batch)

    worker = Worker(dataclasses.replace(mlp(), loss=loss), vivace.inspect().to_dict())
    worker.open({})
    try:
        seconds = 0.5
        while len(calls) <= 64:  # of the last time it warmed up; others may use the machine
            calls.clear()
            worker.warm(seconds=seconds)
            seconds *= 2.0
        calls.clear()
        assert worker.observe()["page_faults"] > 128
    finally:
        worker.session.close()


def test_blocks_without_the_loader_take_one_batch_from_it_in_all():
    read, sums = [], set()

    class Counted(TensorDataset):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    def loss(model, batch):
        sums.add(float(batch[0].sum()))
        batch[0].zero_()
        return mlp().loss(model, batch)

    (x, y), *_ = mlp().data()
    job = dataclasses.replace(mlp(), loss=loss, data=lambda: DataLoader(Counted(x, y), batch_size=2))
    worker = Worker(job, vivace.inspect().to_dict())
    worker.open({})
    try:
        worker.block(1)
        before = len(read)
        sums.clear()
        for _ in range(3):
            worker.block(2, cached=True)
        assert len(read) - before == 2  # samples
        assert len(sums) == 1
    finally:
        worker.session.close()
