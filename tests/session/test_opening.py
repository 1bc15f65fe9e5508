"""Opening a job: what is wrong with it is said in the person's words."""

import pytest

from vivace.errors import JobError
from vivace.session.opening import first_batches


def test_a_loader_without_batches():
    assert first_batches(iter([1, 2, 3]), 2) == [1, 2]
    with pytest.raises(JobError, match=r"data\(\) gave no batch: the loader is empty"):
        first_batches([], 2)
