"""How many trials run at a time: as many as are measured faster, and memory has room for."""

import dataclasses
from pathlib import Path

import pytest

from vivace.inspection import inspect
from vivace.job import JobFunction
from vivace.plan import Plan
from vivace.processes.launch import Source
from vivace.sweeping import packing

JOBS = Path(__file__).parent / "jobs.py"


@pytest.fixture
def packed(tmp_path):
    """``packed(job, most, **parameters)`` on a machine of four cores."""
    machine = dataclasses.replace(inspect(), num_cores=4)

    def measured(job, most=8, **parameters):
        source = Source(JobFunction(f"{JOBS}:{job}"))
        return packing.packed(source, machine, parameters, Plan(), most, 0, tmp_path / "log")

    return measured


def test_trials_that_do_not_hinder_each_other_run_side_by_side(packed):
    """Their steps wait: the more at a time, the more of them; up to as many as there are cores."""
    found = packed("crowded")
    assert found.workers in (2, 4)  # beside busy processes four are not always faster than two
    assert found.threads == 4 // found.workers
    assert found.ratio.low > 1
    assert found.room > 4
    assert found.trial_bytes > 2**20
    assert f"{found.workers} trials at a time on " in found.sentence


def test_trials_that_hinder_each_other_run_one_after_another(packed, tmp_path):
    found = packed("crowded", lock=str(tmp_path / "lock"))
    assert (found.workers, found.threads) == (1, 4)
    assert found.ratio.high < 1
    assert "2 side by side are not measured faster" in found.sentence


def test_one_after_another_is_as_fast_as_it_can_be(packed):
    """What divides badly among threads is told no gain that one thread alone would bring."""
    found = packed("divided", most=2)
    assert found.ratio.estimate < 2
    assert (found.workers, found.threads) in ((1, 1), (2, 2))


def test_memory_decides_before_speed(packed, monkeypatch):
    monkeypatch.setattr(packing, "free_memory", lambda: 2**20)
    found = packed("patient")
    assert (found.workers, found.threads, found.room, found.ratio) == (1, 4, 1, None)
    assert "memory has room for one, which takes" in found.sentence


def test_a_job_that_fails_is_left_to_its_trials(packed):
    found = packed("troubled", trouble="raises")
    assert (found.workers, found.threads) == (1, 4)
    assert "seven is not allowed" in found.sentence
