import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from vivace.data import hanging
from vivace.data.hanging import Board, HangWatch
from vivace.errors import JobError
from vivace.job import Job
from vivace.training.training import train

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


class Sleeping(Dataset):
    """Sleeps without end at sample 5, as often as `lives` has files."""

    def __init__(self, lives):
        self.lives = lives
        self.paths = [f"folder/{index}.jpg" for index in range(12)]

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index == 5:
            for life in self.lives.iterdir():
                life.unlink()
                self.hang()
        return torch.full((3,), float(index)) + torch.rand(3), index % 2

    def hang(self):
        time.sleep(600)


class Slow(Sleeping):
    """Computes for longer than the limit at sample 5."""

    def hang(self):
        end = time.monotonic() + 4.0
        while time.monotonic() < end:
            sum(range(1000))


class SleepingStream(IterableDataset):
    def __init__(self, lives):
        self.inner = Sleeping(lives)

    def __iter__(self):
        return (self.inner[index] for index in range(12))


def job(kind, lives, **more):
    return Job(
        model=lambda: torch.nn.Linear(3, 2),
        data=lambda: DataLoader(kind(lives), batch_size=2, **{"num_workers": 1, **more}),
        loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )


@pytest.fixture
def lives(tmp_path):
    def make(count):
        (tmp_path / "lives").mkdir(exist_ok=True)
        for number in range(count):
            (tmp_path / "lives" / str(number)).touch()
        return tmp_path / "lives"

    return make


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(hanging, "LEAST_SECONDS", 2.0)
    monkeypatch.setattr(hanging, "MOST_TIMES", 0.0)
    looks_for_dead = _MultiProcessingDataLoaderIter._try_get_data
    monkeypatch.setattr(looks_for_dead, "__defaults__", (0.2,))  # and not every five seconds


@pytest.mark.fault(14)
@pytest.mark.parametrize("kind", [Sleeping, SleepingStream])
def test_a_hanging_worker_is_named_and_replaced_and_nothing_changes(lives, tmp_path, impatient, kind):
    weights = []
    for hangs in (0, 1):
        run = train(job(kind, lives(hangs)), out=tmp_path / str(hangs))
        told = [notice for notice in run.notices if "has hung for" in notice]
        assert len(told) == hangs
        weights.append(torch.load(tmp_path / str(hangs) / "model.pt", weights_only=True)["weight"])
    assert torch.equal(*weights)
    assert told[0].startswith("a worker of the loader has hung for")
    assert told[0].endswith("it was replaced")
    assert ("at sample 5 ('folder/5.jpg')" in told[0]) == (kind is Sleeping)


@pytest.mark.fault(14)
def test_one_that_hangs_each_time_ends_the_run(lives, tmp_path, impatient):
    with pytest.raises(
        JobError, match=r"killed again and again; the last one has hung .* at sample 5 \('folder"
    ):
        train(job(Sleeping, lives(9)), out=tmp_path / "run")


@pytest.mark.fault(14)
@pytest.mark.parametrize("steps", [None, 3])
def test_one_of_the_validation_data_is_named_and_the_evaluation_begins_anew(
    lives, tmp_path, impatient, steps
):
    """At the end of an epoch, and where the run ends in the middle of one."""
    (tmp_path / "none").mkdir()
    whole = job(Sleeping, tmp_path / "none", num_workers=0)
    held_out = job(Sleeping, lives(1)).data
    measured = dataclasses.replace(
        whole, validation=held_out, metric=lambda model, batches: sum(len(batch[0]) for batch in batches)
    )
    run = train(measured, out=tmp_path / "run", max_steps=steps)
    assert run.metric == 12
    (told,) = (notice for notice in run.notices if "has hung for" in notice)
    assert told.startswith("a worker of the metric's loader has hung for")
    assert "at sample 5 ('folder/5.jpg'): after step" in told


def test_one_that_computes_is_left_alone(lives, tmp_path, impatient):
    run = train(job(Slow, lives(1)), out=tmp_path / "run")
    assert run.notices == ()


@pytest.mark.parametrize("counted", ["absent", "denied"])
def test_one_that_computes_is_left_alone_where_nobody_tells_what_it_reads(
    lives, tmp_path, impatient, monkeypatch, counted
):
    def denied(process):
        raise psutil.AccessDenied(process.pid)

    if counted == "absent":
        monkeypatch.delattr(psutil.Process, "io_counters")
    else:
        monkeypatch.setattr(psutil.Process, "io_counters", denied)
    run = train(job(Slow, lives(1)), out=tmp_path / "run")
    assert run.notices == ()


@pytest.mark.fault(14)
def test_without_workers_the_person_is_told(lives, tmp_path, impatient, monkeypatch):
    told, end_hang = threading.Event(), HangWatch._end_hang
    monkeypatch.setattr(HangWatch, "_end_hang", lambda self, seconds: (end_hang(self, seconds), told.set()))
    monkeypatch.setattr(Sleeping, "hang", lambda self: told.wait(120))  # what it takes, on a busy machine
    run = train(job(Sleeping, lives(1), num_workers=0), out=tmp_path / "run")
    assert [notice.startswith("reading the data has hung for") for notice in run.notices] == [True]
    assert "sample 5" in run.notices[0]


def test_without_limits_of_a_test_nothing_is_killed_for_minutes():
    assert hanging.LEAST_SECONDS >= 300


class TestWatch:
    @pytest.mark.fault(42)
    def test_time_in_which_the_run_itself_was_stopped_does_not_count(self, impatient):
        """As SIGSTOP does it: the thread's own wait takes longer than it asked for."""

        class Stopped(threading.Event):
            def wait(self, seconds=None):
                time.sleep(1.2)
                return super().wait(seconds)

        watch = HangWatch(lambda text: pytest.fail(text))
        watch._end = Stopped()
        with watch, watch.waiting():
            time.sleep(2.6)

    def test_what_a_worker_reads_on_and_on_is_no_hang(self, impatient, monkeypatch):
        """Nothing but what it reads shows that it works. A look takes no time here, and counts as a tick."""
        monkeypatch.setattr(hanging, "IDLE_SHARE", 1e9)
        monkeypatch.setattr(hanging, "IDLE_BYTES", 2**62)
        told = []

        class Reading(threading.Event):
            looks = 0

            def wait(self, seconds=None):
                watch.board.write(f"sample {self.looks}")
                self.looks += 1
                return super().wait(0.001)

        watch = HangWatch(told.append)
        watch._end = Reading()
        with watch, watch.waiting():
            enough = watch._end.looks + 4 * hanging._LOOKS  # of the limit
            while watch._end.looks < enough and not told:
                time.sleep(0.01)
        assert (told, watch.found) == ([], "")

    def test_other_children_are_spared(self, impatient):
        other, told = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]), []
        try:
            with HangWatch(told.append) as watch:
                watch.begin_pass()
                with watch.waiting():
                    end = time.monotonic() + 20
                    while time.monotonic() < end and not told:
                        time.sleep(0.05)
            assert len(told) == 1
            assert other.poll() is None
        finally:
            other.kill()
            other.wait()


def test_a_board_is_shared_with_forked_processes_only():
    board = Board()
    board.write("sample 1")
    child = os.fork()
    if child == 0:
        board.write("x" * 1000)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    ((process, text),) = board.reading().items()  # the same row: neither is a worker
    assert (process, set(text)) == (child, {"x"})
    kind, arguments = board.__reduce__()
    assert kind(*arguments).reading() == {}
