"""Opening a job: what is wrong with it is said in the person's words."""

import pytest

from vivace.engine.opening import first_batches
from vivace.errors import JobError


def test_a_loader_without_batches():
    assert first_batches(iter([1, 2, 3]), 2) == [1, 2]
    with pytest.raises(JobError, match=r"data\(\) gave no batch: the loader is empty"):
        first_batches([], 2)
