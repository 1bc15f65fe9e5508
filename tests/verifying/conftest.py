"""Rulers that judge with half of the usual effort."""

import pytest

import vivace
from vivace.verifying.effort import Effort
from vivace.verifying.ruler import Ruler

HALF = Effort(6, 2, 2, 8, 3, life_seeds=3, pairs=24)


@pytest.fixture(scope="session")
def prepared():
    """``(job) -> ruler``: the effort is `HALF`, however fast the machine is.

    As with seconds that are given, what is broken near the limits is judged again with all of the effort.
    """
    machine = vivace.inspect().to_dict()

    def prepare(job):
        ruler = Ruler(job, machine)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Effort, "within", lambda seconds, step_seconds: HALF)
            ruler.prepare()
        return ruler

    return prepare
