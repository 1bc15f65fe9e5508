"""Paired measurement on a job whose step takes a known time."""

import contextlib
import itertools
import os
import time
import types
from pathlib import Path

import psutil
import pytest

import vivace
from vivace.errors import JobError, Refused, Unsteady
from vivace.job import load
from vivace.measuring.paired import Contestant, compare
from vivace.measuring.quiet import ForeignLoad
from vivace.plan import Plan
from vivace.processes.launch import Source

STAGE = f"{Path(__file__).parents[1] / 'scenes' / 'stage.py'}:job"


@pytest.fixture(scope="module")
def contestants():
    load(STAGE)  # registers the planted techniques here
    source, machine = Source(STAGE), vivace.inspect()
    made = [Contestant(source, machine) for _ in range(2)]
    yield made
    for contestant in made:
        contestant.close()


def test_the_ratio_of_a_known_speed_up(contestants):
    reference, candidate = contestants
    reference.open(Plan(), warm_seconds=0.1)
    candidate.open(Plan.from_dict({"planted_quick": {}}), warm_seconds=0.1)
    result = compare(reference, candidate, seconds=8, target=1.0)
    assert len(result.pairs) >= 6
    assert 2.0 < result.ratio.low <= result.ratio.estimate <= result.ratio.high < 5.0  # 40 ms against 10 ms


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


class Noisy:
    """Blocks of a known mean whose seconds a sample swing by a known factor."""

    step_seconds = 1e-3

    def __init__(self, seconds, swing, cpu_seconds=None):
        self.child = types.SimpleNamespace(pid=os.getpid())
        self.cpu_seconds = cpu_seconds
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
@pytest.mark.parametrize("target", [None, 1.0])
def test_what_lies_above_one_is_faster_however_wide(target):
    found = compare(Noisy(1.0, 1.1), Noisy(1 / 20, 2.5), seconds=1e-3, target=target)
    assert found.ratio.wide
    assert 1.0 < found.ratio.low == found.ratio.counts < found.ratio.estimate


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
