"""Paired measurement on a job whose step takes a known time."""

import contextlib
import itertools
import os
import signal
import threading
import time
import types
from pathlib import Path

import psutil
import pytest

import vivace
from vivace.errors import JobError, Refused, Unsteady
from vivace.inspection.quiet import ForeignLoad
from vivace.job import load
from vivace.measuring.paired import Clocks, Contestant, Timed, compare
from vivace.measuring.statistics import LAST, stretched
from vivace.plan import Plan
from vivace.processes.launch import Source

STAGE = f"{Path(__file__).parents[1] / 'scenes' / 'stage.py'}:job"


@pytest.fixture(scope="module")
def contestants():
    load(STAGE)  # registers the planted techniques here
    source, machine = Source(STAGE), vivace.inspect()
    made = [Contestant(source, machine) for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vivace.measuring.paired.BLOCK_SECONDS", 0.12)  # of three steps at least
        yield made
    for contestant in made:
        contestant.close()


def test_the_ratio_of_a_known_speed_up(contestants):
    reference, candidate = contestants
    reference.open(Plan(), warm_seconds=0.1)
    candidate.open(Plan.from_dict({"planted_quick": {}}), warm_seconds=0.1)
    result = compare(reference, candidate, seconds=8, target=1.0)
    assert len(result.pairs) >= 4  # a busy machine may end the time with these
    assert 2.0 < result.ratio.low <= result.ratio.estimate <= result.ratio.high < 5.0  # 40 ms against 10 ms


@pytest.mark.fault(42)
def test_a_process_that_is_stopped_in_the_middle_of_a_block_changes_no_ratio(contestants, monkeypatch):
    reference, candidate = contestants
    reference.open(Plan(), warm_seconds=0.1)
    candidate.open(Plan.from_dict({"planted_quick": {}}), warm_seconds=0.1)
    whole, blocks, took = candidate.block, itertools.count(), []

    def stop():
        os.killpg(candidate.child.pid, signal.SIGSTOP)
        time.sleep(1.5)
        os.killpg(candidate.child.pid, signal.SIGCONT)

    def block(steps, **how):
        stopping = threading.Timer(0.04, stop)
        if next(blocks) == 2:
            stopping.start()
        begin = time.monotonic()
        try:
            return whole(steps, **how)
        finally:
            took.append(time.monotonic() - begin)
            if stopping.is_alive():
                stopping.join()

    monkeypatch.setattr(candidate, "block", block)
    result = compare(reference, candidate, seconds=300, tolerance=0.3)  # until twelve pairs outvote one
    assert max(took) > 1.5, "it was not stopped"
    assert len(result.pairs) < 60  # enough, and long before the time is over
    assert 2.0 < result.ratio.low <= result.ratio.high < 5.0  # as without


def test_a_hopeless_candidate_is_stopped_early(contestants):
    reference, candidate = contestants
    reference.open(Plan(), warm_seconds=0.1)
    candidate.open(Plan.from_dict({"planted_slow": {}}), warm_seconds=0.1)
    result = compare(reference, candidate, seconds=60, target=1.0)
    assert len(result.pairs) < 12
    assert result.ratio.high < 1.0


def test_a_refusal_names_the_technique(contestants):
    with pytest.raises(Refused, match=r"^planted_refusal: it never acts$"):
        contestants[1].open(Plan.from_dict({"planted_refusal": {}}))


def test_the_job_is_described(contestants):
    facts = contestants[0].ask("check")
    assert facts["batch_size"] == 8
    assert facts["num_parameters"] == 8 * 16 + 16 + 16 * 4 + 4
    assert facts["optimizer"] == "SGD"
    assert facts["steps_per_epoch"] == 8
    assert facts["signature"] == contestants[1].ask("check")["signature"]


def test_how_often_the_memory_was_full_is_added_up():
    done = {"seconds": 1.0, "samples": 8, "waited": 0.0}
    answers = [{**done, "full": 2}, done, {**done, "full": 3}]
    child = types.SimpleNamespace(pid=os.getpid(), ask=lambda *_, **__: answers.pop(0), alive=False)
    timed = Timed(child, timeout=1.0)
    for _ in range(3):
        timed.block(1)
    assert timed.full == 5


class Noisy:
    """Blocks of a known mean whose seconds a sample swing by a known factor."""

    step_seconds = 1e-3

    def __init__(self, seconds, swing, cpu_seconds=None, *, alone=None):
        self.child, self.processes = types.SimpleNamespace(pid=os.getpid()), [os.getpid()]
        self.clocks = Clocks(cpu_seconds, alone=alone) if cpu_seconds is not None else None
        self.steps = []
        self.blocks = (seconds * swing**power for power in itertools.cycle([0, 1, -1, 1, 0, -1]))

    def block(self, steps, cached=False):
        self.steps.append(steps)
        return next(self.blocks)


@pytest.fixture
def alone(monkeypatch):
    """No other process is busy, whatever this machine does meanwhile."""
    monkeypatch.setattr(ForeignLoad, "disturb", lambda self: False)


@pytest.mark.usefixtures("alone")
def test_what_is_faster_is_timed_until_the_machine_shows_by_how_much():
    found = compare(Noisy(1.0, 1.02), Noisy(1 / 8, 1.5), seconds=60, target=1.0)
    assert 6 < len(found.pairs) < 60
    assert found.ratio.high - found.ratio.low < 0.5 * found.ratio.estimate
    with pytest.raises(Unsteady, match="too unsteady to conclude"):
        compare(Noisy(1.0, 1.1), Noisy(1.0, 3.0), seconds=1e-3, target=1.0)


@pytest.mark.usefixtures("alone")
def test_a_rehearsal_calls_no_machine_too_unsteady(monkeypatch):
    """As benchmarks/gpu.sh --dry-run, which times a few steps of tiny networks beside anything."""
    monkeypatch.setattr("vivace.ledger.WIDE", float("inf"))
    found = compare(Noisy(1.0, 1.1), Noisy(1.0, 3.0), seconds=1e-3, tolerance=10.0)
    assert found.ratio.low < 1.0 < found.ratio.high
    assert found.ratio.width > 0.5


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("target", [None, 1.0])
def test_what_lies_above_one_is_faster_however_wide(target):
    found = compare(Noisy(1.0, 1.1), Noisy(1 / 20, 2.5), seconds=1e-3, target=target)
    assert found.ratio.wide
    assert 1.0 < found.ratio.low == found.ratio.counts < found.ratio.estimate


@pytest.mark.usefixtures("alone")
def test_whether_a_machine_is_too_unsteady_is_asked_of_the_interval_before_it_is_told_wider():
    found = compare(Noisy(1.0, 1.0), Noisy(1.0, 1.16), seconds=0, target=1.0)
    assert found.ratio.wide
    assert not stretched(found.ratio, 1 / LAST).wide


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("swing", "how"), [(1.12, {"seconds": 0}), (1.02, {"seconds": 60, "tolerance": 0.06})]
)
def test_where_time_or_tolerance_ended_the_timing_what_is_faster_is_told_as_wide_as_what_is_not(swing, how):
    plain = compare(Noisy(1.0, 1.0), Noisy(1 / 4, swing), **how)
    found = compare(Noisy(1.0, 1.0), Noisy(1 / 4, swing), target=1.0, **how)
    assert found.pairs == plain.pairs
    assert found.ratio == stretched(plain.ratio, LAST)


@pytest.fixture
def crowded(monkeypatch):
    """Others are busy all the time."""
    monkeypatch.setattr(ForeignLoad, "disturb", lambda self: True)


@pytest.mark.usefixtures("crowded")
def test_on_a_busy_machine_the_processors_clock_answers():
    reference, candidate = Noisy(2.0, 3.0, cpu_seconds=1.0), Noisy(1.5, 3.0, cpu_seconds=0.8)
    found = compare(reference, candidate, seconds=60, target=1.0)
    assert found.ratio.estimate == pytest.approx(1.25)
    assert found.ratio.low > 1.0
    assert len(found.pairs) == len(found.counted) < 12
    assert found.pairs != found.counted


@pytest.mark.usefixtures("crowded")
@pytest.mark.parametrize(("threads", "wanted"), [(1, 2.02), (2, 2.0)])
def test_of_one_thread_on_a_busy_machine_the_processors_clock_counts_however_narrow_the_walls(
    threads, wanted
):
    reference = Noisy(2.0, 1.06, cpu_seconds=1.01, alone=threads == 1)
    candidate = Noisy(1.0, 1.06, cpu_seconds=0.5, alone=threads == 1)
    found = compare(reference, candidate, seconds=60, tolerance=0.1)
    assert found.ratio.estimate == pytest.approx(wanted, rel=0.004)
    assert (found.counted != found.pairs) == (threads == 1)


@pytest.mark.usefixtures("crowded")
def test_where_blocks_are_unsteady_they_become_steps():
    reference, candidate = Noisy(2.0, 3.0), Noisy(1.5, 3.0)
    with contextlib.suppress(Unsteady):
        compare(reference, candidate, seconds=60)
    assert reference.steps[0] == candidate.steps[0] > 1
    assert reference.steps[-1] == candidate.steps[-1] == 1


@pytest.mark.usefixtures("crowded")
@pytest.mark.parametrize(
    ("reference", "candidate"),
    [
        (None, None),  # not known: a GPU computes
        (0.01, 0.008),  # a step that sleeps
        (1.0, 0.05),  # it says twenty times, and the wall's clock something else
    ],
)
def test_a_clock_that_cannot_know_is_not_asked(reference, candidate):
    with contextlib.suppress(Unsteady):
        found = compare(Noisy(1.0, 2.0, reference), Noisy(1.0, 2.0, candidate), seconds=60)
        assert found.counted == found.pairs


@pytest.mark.usefixtures("alone")
def test_on_a_quiet_machine_the_walls_clock_counts():
    found = compare(Noisy(1.0, 1.01, 1.0), Noisy(0.5, 1.01, 1.0), seconds=60)
    assert found.ratio.estimate == pytest.approx(2.0, rel=0.02)
    assert found.counted == found.pairs


class Clocked(Noisy):
    """Blocks of a known time by the wall clock, swinging, and of known times by the others."""

    def __init__(self, seconds, swing, working, *, starved=0.0, alone=False):
        super().__init__(seconds, swing)
        self.clocks = Clocks(working, starved, alone)


@pytest.fixture
def beside_another(monkeypatch):
    """Another process used half of the processor during every pair."""

    def disturb(self):
        self.largest = 0.52
        return True

    monkeypatch.setattr(ForeignLoad, "disturb", disturb)


@pytest.mark.usefixtures("beside_another")
@pytest.mark.parametrize("target", [None, 500.0])
def test_threads_that_a_neighbour_keeps_waiting_are_not_told_as_a_speed(target):
    waiting = Clocked(0.29, 1.02, 0.105, starved=0.6)  # as seen: either clock says 75, a quiet machine 7
    with pytest.raises(Unsteady, match=r"could not be measured \(others used up to 52 % of the proc") as told:
        compare(waiting, Clocked(0.0039, 1.02, 0.0014, starved=0.2), seconds=1e-3, target=target)
    assert told.value.foreign_share == 0.52


@pytest.mark.usefixtures("beside_another")
def test_others_that_keep_no_thread_of_ours_waiting_do_not_count():
    found = compare(Clocked(0.4, 1.001, 0.8), Clocked(0.1, 1.001, 0.1), seconds=1e-3).ratio
    assert found.estimate == pytest.approx(4.0, rel=0.01)
    assert not found.wide


@pytest.mark.usefixtures("beside_another")
def test_one_thread_beside_a_neighbour_counts_by_both_clocks():
    kept = {"starved": 0.5, "alone": True}
    found = compare(Clocked(0.40, 1.02, 0.20, **kept), Clocked(0.10, 1.02, 0.048, **kept), seconds=1e-3).ratio
    assert 3.8 < found.low < 4.0
    assert 4.16 < found.high < 4.3
    with pytest.raises(Unsteady, match="could not be measured"):
        compare(Clocked(0.8, 1.1, 0.04, **kept), Clocked(0.007, 1.1, 0.006, **kept), seconds=1e-3)
    slow = compare(
        Clocked(0.8, 1.6, 0.05, **kept), Clocked(0.4, 1.1, 0.05, **kept), seconds=1e-3, target=30.0
    )
    assert slow.ratio.high < 0.97 * 30.0


@pytest.mark.usefixtures("alone")
def test_what_stays_wide_on_a_quiet_machine_is_not_told_where_clocks_are_known():
    with pytest.raises(Unsteady, match=r"could not be measured \(unsteady\)"):
        compare(Clocked(1.0, 1.1, 0.1), Clocked(1 / 20, 2.5, 0.05), seconds=1e-3)


BAD = {
    "not_a_scalar": ("loss=lambda m, b: m(b[0])", "loss has the shape (4, 2); it must be one number"),
    "nan": ("loss=lambda m, b: m(b[0]).sum() * float('nan')", "loss is nan at step 0"),
    "empty": ("data=lambda: []", "gave no batch"),
    "raises": ("loss=lambda m, b: m(b[7]).sum()", "first step failed: IndexError"),
    "no_module": ("model=lambda: 3", "returned a int; it must return an nn.Module"),
    "reads": ("data=lambda: input()", "must not read it"),
    "no_optimizer": ("optimizer=lambda m: 3", "not a torch.optim.Optimizer"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_faulty_job_is_named_in_one_sentence(name, tmp_path):
    change, message = BAD[name]
    path = tmp_path / "faulty.py"
    path.write_text(
        "import torch, vivace\n"
        "parts = dict(model=lambda: torch.nn.Linear(2, 2), data=lambda: [[torch.randn(4, 2)]],\n"
        "    loss=lambda m, b: m(b[0]).sum(), optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1))\n"
        f"job = vivace.Job(**(parts | dict({change})))\n"
    )
    contestant = Contestant(Source(f"{path}:job"), vivace.inspect())
    try:
        with pytest.raises(JobError) as caught:
            contestant.ask("check")
    finally:
        contestant.close()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_whoever_is_not_on_turn_stands_still(contestants):
    contestant = contestants[0]
    contestant.open(Plan(), warm_seconds=0.1)
    contestant.block(1)
    process, deadline = psutil.Process(contestant.child.pid), time.monotonic() + 600
    while process.status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.status() == psutil.STATUS_STOPPED
    assert contestant.ask("observe")["operators"]
    assert process.status() != psutil.STATUS_STOPPED
