"""Memory as an input of tune."""

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import vivace
from vivace.errors import AnswerIsNo, InputError
from vivace.machine import Device
from vivace.measuring.worker import largest_batch
from vivace.technique import Numerics
from vivace.tuning import budget

SCENE = Path(__file__).parents[1] / "training" / "scenes" / "crowded.py"


def test_sizes_and_words():
    assert budget.parse_memory("1.5 gib") == 3 * 2**29
    free = budget.free_bytes()
    assert 0.7 * free < budget.parse_memory("auto") < free
    with pytest.raises(InputError, match="'much'; write a size such as 20GiB or 800MiB, or auto"):
        budget.parse_memory("much")
    with pytest.raises(InputError, match="'20'; write a size such as 20GiB"):
        budget.parse_memory("20")  # bytes? GiB?


def test_a_number_of_bytes_is_taken_as_it_is_and_none_else():
    assert budget.parse_memory(20e9) == 20 * 10**9
    for wrong in (-5, 0, float("nan"), float("inf"), True):
        with pytest.raises(InputError, match="the memory budget is"):
            budget.parse_memory(wrong)


def test_a_containers_limit_bounds_what_is_free(monkeypatch):
    """How that is read: tests/inspection/test_sources.py."""
    monkeypatch.setattr(budget, "free_memory", lambda: 600_000)
    assert budget.free_bytes() == 600_000


def test_a_gpus_free_memory_is_asked_of_the_one_that_is_visible(monkeypatch):
    gpu = dataclasses.replace(vivace.inspect(), devices=(Device("cuda", "a GPU", 2**34),))
    monkeypatch.setattr(budget, "inspect", lambda: gpu)
    monkeypatch.setattr(budget, "ASKING", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert budget.free_bytes() == 3  # the child sees what training sees


def test_exact_plans_alone_where_nothing_else_is_allowed():
    exact = list(budget.smaller_plans("cpu", Numerics.EXACT))
    assert [plan.names for plan in exact] == [("checkpoint",), ("optimizer_in_backward",)]
    plans = list(budget.smaller_plans("cpu", Numerics.ROUNDING))
    assert plans[: len(exact)] == exact
    assert plans[len(exact)].to_dict() == {"micro_batches": {}}
    assert plans[len(exact) + 1].names == ("checkpoint", "micro_batches")
    nums = [plan.to_dict()["micro_batches"].get("num", 2) for plan in plans if "micro_batches" in plan.names]
    assert nums == [num for num in (2, 4, 8, 16, 32, 64) for _ in range(2)]
    assert "offload_activations" in {n for p in budget.smaller_plans("cuda", Numerics.EXACT) for n in p.names}


def test_the_largest_batch_is_found_where_batches_differ():
    batches = [torch.zeros(n) for n in (3, 3, 9, 2)]
    assert [len(b) for b in largest_batch(batches, 5.0)] == [9]
    assert largest_batch([torch.zeros(3)] * 9, 5.0) == []
    assert largest_batch(itertools.repeat(torch.zeros(3)), 600.0) == []
    short_ones_first = [torch.zeros(n) for n in (3, 3, 3, 3, 3, 3, 3, 3, 9)]
    assert [len(b) for b in largest_batch(short_ones_first, 5.0)] == [9]
    ragged = DataLoader([torch.zeros(n) for n in (1, 5, 2, 4)], batch_size=1)
    assert largest_batch(ragged, 5.0)[0].shape == (1, 5)


@pytest.mark.slow
def test_a_job_that_does_not_fit_starts_from_a_smaller_plan(tmp_path, monkeypatch):
    monkeypatch.setenv("MOST", "2")
    result = vivace.tune(f"{SCENE}:job", budget=6, out=tmp_path / "tune")
    assert result.reference.to_dict() == {"micro_batches": {"num": 4}}
    assert set(result.reference.names) <= set(result.plan.names)
    assert result.to_dict()["reference"] == {"micro_batches": {"num": 4}}


def test_a_job_that_fits_nowhere_is_an_answer(tmp_path, monkeypatch):
    monkeypatch.setenv("MOST", "0")
    with pytest.raises(AnswerIsNo, match="not even recomputed or one sample at a time"):
        vivace.tune(f"{SCENE}:job", budget=20, out=tmp_path / "tune")
