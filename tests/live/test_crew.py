"""Worker processes that fetch ahead: what they hand over, how they end, and what they do not let through."""

import dataclasses
import logging
import os
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path

import numpy
import psutil
import pytest
import torch

import vivace
from vivace.live.crew import CannotFetch, Crew
from vivace.live.fetching import difference

MAIN = os.getpid()


@pytest.fixture
def crew():
    """``crew(fetch, ...)`` with two workers; all are closed, and gone, after the test."""
    made = []

    def make(fetch, slot_bytes=2**20, patience=20.0):
        made.append(Crew(fetch, 2, 2, slot_bytes, patience))
        return made[-1]

    yield make
    processes = [pid for each in made for pid in each.processes]
    for each in made:
        each.close()
    assert not [pid for pid in processes if psutil.pid_exists(pid)]


@dataclasses.dataclass
class Graph:
    nodes: torch.Tensor
    names: list[str]


def everything(index):
    numbers = torch.arange(4000.0) + index
    return {
        "float": numbers,
        "half": numbers.bfloat16(),
        "complex": torch.complex(numbers, numbers),
        "bool": numbers > 5,
        "channels last": numbers.reshape(2, 5, 20, 20).to(memory_format=torch.channels_last),
        "empty": torch.zeros(0, 3),
        "small": torch.tensor([1.0, float("nan")]),
        "number": torch.tensor(3),
        "array": numpy.arange(5000) * index,
        "names": ["one", b"two", 3, None, 4.0, float("nan")],
        "graph": Graph(numbers[:8], ["a"]),
        "ordered": OrderedDict(a=(1, numbers[:2])),
    }


def test_batches_of_any_kind_come_in_order_and_in_memory_of_ones_own(crew):
    workers = crew(everything)
    for index in range(4):
        workers.ask(index)
    for index in range(8):
        batch = workers.take()
        assert difference(batch, everything(index)) == ""
        assert not batch["float"].is_shared()
        batch["float"].zero_(), batch["array"].fill(0)  # disturbs nothing that comes
        if index < 4:
            workers.ask(index + 4)


def test_a_batch_is_passed_over(crew):
    workers = crew(lambda index: index)
    for index in range(3):
        workers.ask(index)
    workers.pass_over()
    assert workers.take() == 1


@pytest.mark.parametrize(
    ("fetch", "reason"),
    [
        (lambda index: torch.zeros(2**20), "much larger"),
        (lambda index: (x for x in "ab"), "cannot pickle"),
        (lambda index: torch.rand(1), "draws random numbers"),
        (lambda index: print("here"), "prints"),
        (lambda index: os.write(2, b"here"), "prints"),
        (lambda index: logging.getLogger("data").warning("here"), "prints"),
        (lambda index: os._exit(1), "died"),
        (lambda index: subprocess.run(["true"]), "starts something (subprocess.Popen"),
        (lambda index: os.mkdir("/tmp/never"), "os.mkdir"),
    ],
)
def test_what_may_not_be_is_a_sentence(crew, fetch, reason, capfd):
    workers = crew(fetch)
    workers.ask(0)
    with pytest.raises(CannotFetch) as failed:
        workers.take()
    assert reason in str(failed.value)
    assert capfd.readouterr() == ("", "")


def test_a_write_that_the_data_set_swallows_is_seen(crew, tmp_path):
    def fetch(index):
        try:
            (tmp_path / "cache").write_text("cached")
        except OSError:
            return 1
        return 2

    workers = crew(fetch)
    workers.ask(0)
    with pytest.raises(CannotFetch, match="writes"):
        workers.take()
    assert not (tmp_path / "cache").exists()


def test_a_batch_that_is_another_the_second_time(crew):
    counted = iter(range(100))
    workers = crew(lambda index: next(counted))
    workers.ask(0, twice=True)
    with pytest.raises(CannotFetch, match="fetched twice, it is another batch"):
        workers.take()


def test_a_hanging_worker_is_waited_for_so_long_and_killed(crew):
    workers = crew(lambda index: time.sleep(600), patience=0.1)
    workers.ask(0)
    with pytest.raises(CannotFetch, match="gave nothing in"):
        workers.take()


def test_workers_answer_no_signal_of_the_script(crew):
    called = []
    before = {number: signal.signal(number, lambda *_: called.append(1)) for number in (signal.SIGUSR1, 15)}
    try:
        workers = crew(lambda index: index)
        workers.ask(0)
        assert workers.take() == 0
        for pid in workers.processes:
            os.kill(pid, signal.SIGUSR1)
            os.kill(pid, signal.SIGINT)
        workers.ask(1)
        assert workers.take() == 1
        assert not called
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_workers_end_with_the_process_that_started_them(tmp_path):
    program = (
        "import os, signal, time\n"
        "from vivace.live.crew import Crew\n"
        "crew = Crew(lambda index: time.sleep(600), 2, 2, 4096, 5.0)\n"
        "print(*crew.processes, flush=True)\n"
        "crew.ask(0)\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(vivace.__file__).parents[1])}
    script = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment)
    assert script.stdout is not None
    with script:
        workers = list(map(int, script.stdout.readline().split()))
        assert all(map(psutil.pid_exists, workers))
        script.kill()
        script.wait()
        end = time.monotonic() + 20
        while any(map(_lives, workers)) and time.monotonic() < end:
            time.sleep(0.05)
    assert not any(map(_lives, workers))


def _lives(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
