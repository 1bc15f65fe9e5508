"""Rulers that tests of a module share, and techniques that are planted for one."""

import dataclasses
import functools
import importlib

import pytest
import torch

import vivace
from vivace import Card, Numerics, Technique
from vivace.plan import Plan
from vivace.technique import registry
from vivace.verifying.effort import Effort
from vivace.verifying.ruler import Ruler

SHORT = Effort(8, 2, 2, 8, 3, life_seeds=3)  # a little more than half of the usual one


@pytest.fixture(scope="module")
def ruler_of():
    """``(make, *arguments) -> Ruler``: of the job ``make(*arguments)``, prepared once, on one thread.

    The effort is `SHORT`, however fast the machine is. As with seconds that are given, what is broken near
    the limits is judged again with all of the effort.
    """
    torch.set_num_threads(1)

    @functools.cache
    def prepared(make, *arguments):
        ruler = Ruler(make(*arguments), vivace.inspect().to_dict())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Effort, "within", lambda seconds, step_seconds: SHORT)
            ruler.prepare()
        return ruler

    return prepared


@pytest.fixture(scope="module")
def examined():
    """benchmarks/examined.py, whose defects are registered while the tests of a module run."""
    before = dict(registry._registered)
    module = importlib.import_module("examined")
    registry._registered.update(module.defects.REGISTERED)
    yield module
    registry._registered.clear()
    registry._registered.update(before)


@pytest.fixture
def planted(register):
    """``(function, stage, numerics) -> plan``: of one technique, which does what ``function(build)`` does."""

    def plan_of(function, stage, numerics=Numerics.ROUNDING):
        body = {
            "card": Card(stage, numerics, "x", "x", unit_roundoff=2.0**-8 if numerics else 0.0),
            "name": f"planted_{function.__name__}",
            "apply": lambda self, build: function(build),
            "__annotations__": {},
        }
        cls = dataclasses.dataclass(frozen=True)(type(function.__name__, (Technique,), body))
        return Plan([register(cls)()]).to_dict()

    return plan_of
