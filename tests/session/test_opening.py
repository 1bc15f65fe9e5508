"""Opening a job: what is wrong with it is said in the person's words."""

import dataclasses

import pytest
from torch import nn

from vivace.errors import JobError
from vivace.session.opening import first_batches, models_of, parts_of
from vivace.testing import TINY_JOBS


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


@pytest.mark.parametrize("layer", [nn.LazyLinear(2), nn.LazyBatchNorm1d(affine=False)])
def test_a_model_whose_shapes_are_not_known_yet_is_named(layer):
    job = TINY_JOBS["mlp"]()
    reason = r"'1\.(weight|running_mean)' has no shape yet, as it is of a lazy layer"
    with pytest.raises(JobError, match=reason):
        models_of(job, nn.Sequential(nn.Flatten(), layer))
