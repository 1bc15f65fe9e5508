"""Rulers that judge with a little more than half of the usual effort."""

import pytest

import vivace
from vivace.verifying.effort import Effort
from vivace.verifying.ruler import Ruler

SHORT = Effort(8, 2, 2, 8, 3, life_seeds=3)


@pytest.fixture(scope="session")
def prepared():
    """``(job) -> ruler``: the effort is `SHORT`, however fast the machine is.

    As with seconds that are given, what is broken near the limits is judged again with all of the effort.
    """
    machine = vivace.inspect().to_dict()

    def prepare(job):
        ruler = Ruler(job, machine)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Effort, "within", lambda seconds, step_seconds: SHORT)
            ruler.prepare()
        return ruler

    return prepare
