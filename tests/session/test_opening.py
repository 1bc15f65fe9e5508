"""Opening a job: what is wrong with it is said in the person's words."""

import dataclasses

import pytest
from torch import nn

from vivace.errors import JobError
from vivace.session.opening import first_batches, parts_of


def test_a_loader_without_batches():
    assert first_batches(iter([1, 2, 3]), 2) == [1, 2]
    with pytest.raises(JobError, match=r"data\(\) gave no batch: the loader is empty"):
        first_batches([], 2)


def test_models_in_a_dataclass_with_slots_are_found():
    @dataclasses.dataclass(slots=True)
    class Pair:
        one: nn.Module
        other: nn.Module

    pair = Pair(nn.Linear(1, 1), nn.Linear(1, 1))
    assert parts_of(pair, nn.Module) == [pair.one, pair.other]
