"""Every technique beside every other against the contract, and alone where no file of its own does that; new
ones are covered as they appear.
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
TOGETHER = 6  # techniques of one plan


def _setting(name):
    """A setting that can act here: the technique's first proposal, else its defaults."""
    return variants(registry.find(name))[-1 if name == "cpu_threads" else 0]


def _share_a_slot(first, second):
    slot = registry.find(first).card.slot
    return slot is not None and slot == registry.find(second).card.slot


def _covering(names):
    """Plans of a few techniques, so that every two that can stand in one plan do so in one of these."""
    apart = [pair for pair in itertools.combinations(names, 2) if not _share_a_slot(*pair)]
    left, plans = dict.fromkeys(map(frozenset, apart)), []
    while left:
        plan = sorted(next(iter(left)))
        while len(plan) < TOGETHER:
            fitting = [n for n in names if n not in plan and not any(_share_a_slot(n, p) for p in plan)]
            news = {name: sum(frozenset((name, other)) in left for other in plan) for name in fitting}
            best = max(news, key=news.__getitem__, default="")
            if not news.get(best):
                break
            plan.append(best)
        for pair in itertools.combinations(plan, 2):
            left.pop(frozenset(pair), None)
        plans.append(plan)
    return plans


pytestmark = pytest.mark.usefixtures("one_thread")


def _compiles(*names):
    return any(registry.find(name).card.stage == Stage.COMPILE for name in names)


def _marked(*arguments, names):
    marks = [pytest.mark.slow] if _compiles(*names) else []
    return pytest.param(*arguments, marks=marks, id="-".join(arguments))


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
    ("names", "job"),
    [
        pytest.param(plan, job, marks=[pytest.mark.slow] if _compiles(*plan) else [], id=f"{number}-{job}")
        for job, able in (("mlp", ABLE), ("cnn", [name for name in ABLE if not _compiles(name)]))
        for number, plan in enumerate(_covering(able))
    ],
)
def test_together(names, job):
    """One that refuses leaves; each of the others then stands beside it alone, if it acts alone."""
    acting, refusing = list(names), []
    while acting and (reason := check(Plan(map(_setting, acting)), job)):
        refusing.append(reason.partition(":")[0])
        acting.remove(refusing[-1])
    for name in refusing:
        if not check(Plan([_setting(name)]), job):
            for other in names:
                if other != name:
                    check(Plan([_setting(name), _setting(other)]), job)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ABLE])
def test_what_is_refused_on_any_job_undoes_the_other(name):
    assert check(Plan([_setting(ABLE[0]), _setting(name)]), "mlp").startswith(f"{name}: ")


def test_every_two_are_in_one_plan_or_share_a_slot():
    covered = {frozenset(pair) for plan in _covering(ABLE) for pair in itertools.combinations(plan, 2)}
    for one, other in itertools.combinations(ABLE, 2):
        assert _share_a_slot(one, other) != (frozenset((one, other)) in covered)
        if _share_a_slot(one, other):
            with pytest.raises(PlanError, match=registry.find(one).card.slot):
                Plan([_setting(one), _setting(other)])
