"""Every technique in pairs against the contract, and alone where no file of its own does that; new ones are
covered as they appear.
"""

import itertools
from pathlib import Path

import pytest

from vivace.errors import PlanError
from vivace.inspection import inspect
from vivace.plan import Plan
from vivace.session.opening import training_device
from vivace.technique import Stage, registry
from vivace.testing import TINY_JOBS, check, variants

NAMES = [cls.name for cls in registry.everything()]
TECHNIQUES = Path(__file__).parents[1] / "techniques"
COMPILED_JOBS = ("mlp", "cnn", "gan")
DEVICE = training_device(inspect()).type


def _has_a_contract(name):
    """Is it held against the contract, alone, in a file of its own?"""
    path = TECHNIQUES / f"test_{name}.py"
    return path.exists() and "(TechniqueContract)" in path.read_text(encoding="utf-8")


def _can_act(name):
    """Can it act on this device, in one process?"""
    card = registry.find(name).card
    return DEVICE in card.devices and not card.averages_ranks


ABLE = [name for name in NAMES if _can_act(name)]
# What is refused here on any job stands beside one other technique, which has to be undone.
PAIRS = [*itertools.combinations(ABLE, 2), *((ABLE[0], name) for name in NAMES if name not in ABLE)]

pytestmark = pytest.mark.usefixtures("one_thread")


def _compiles(*names):
    return any(registry.find(name).card.stage == Stage.COMPILE for name in names)


def _marked(*arguments, names):
    marks = [pytest.mark.slow] if _compiles(*names) else []
    return pytest.param(*arguments, marks=marks, id="-".join(arguments))


def _setting(name):
    """A setting that can act here: the technique's first proposal, else its defaults."""
    return variants(registry.find(name))[-1 if name == "cpu_threads" else 0]


@pytest.mark.parametrize(
    ("name", "job"),
    [
        _marked(name, job, names=[name])
        for name in NAMES
        if not _has_a_contract(name)
        for job in (COMPILED_JOBS if _compiles(name) else TINY_JOBS)
    ],
)
def test_alone(name, job):
    check(Plan([_setting(name)]), job)


@pytest.mark.parametrize(
    ("first", "second", "job"),
    [
        _marked(*pair, job, names=pair)
        for pair in PAIRS
        for job in (["mlp"] if _compiles(*pair) else ["mlp", "cnn"])
    ],
)
def test_pair(first, second, job):
    one, other = _setting(first), _setting(second)
    if one.card.slot is not None and one.card.slot == other.card.slot:
        with pytest.raises(PlanError, match=one.card.slot):
            Plan([one, other])
        return
    check(Plan([one, other]), job)
