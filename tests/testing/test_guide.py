"""The page for those who write techniques: its examples run as they are written, its tables are complete."""

import dataclasses
import importlib
import re
import sys
from pathlib import Path

import pytest

import vivace
from vivace.inspection import inspect
from vivace.observing.reference import profile_reference
from vivace.plan import Plan
from vivace.session.opening import start
from vivace.technique import registry
from vivace.testing import TINY_JOBS, plain_profile

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "write-a-technique.md").read_text(encoding="utf-8")
NAMES = re.findall(r"Save this as `(\w+)\.py`", PAGE)
*EXAMPLES, TESTS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def tests(tmp_path, monkeypatch):
    """The module of tests on the page, beside the files that the page says to save."""
    for name, text in zip([*NAMES, "tests_of_the_page"], [*EXAMPLES, TESTS], strict=True):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_registered", {})
    yield importlib.import_module("tests_of_the_page")
    for name in [*NAMES, "tests_of_the_page"]:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["TestFewerThreads", "TestCollectBetweenSteps"])
def test_the_examples_pass_the_contract(tests, name):
    contract = getattr(tests, name)()
    for check in [check for check in dir(contract) if check.startswith("test_")]:
        getattr(contract, check)()


def test_the_example_wraps_the_step(tests):
    job = TINY_JOBS["gan"]()
    with start(job, Plan([tests.CollectBetweenSteps(every=2)]), inspect()) as session:
        for batch in list(job.data())[:3]:
            session.step(batch)
        assert session.build.notes["collect_between_steps"] == 3


def test_every_seam_is_in_the_table():
    assert re.findall(r"^\| `(\w+)` \| `\(", PAGE, re.MULTILINE) == [seam.value for seam in vivace.Seam]


def test_every_key_of_profile_and_observation_is_named():
    job = TINY_JOBS["cnn"]()
    with start(job, Plan(), inspect()) as session:
        profile = profile_reference(session, job, list(job.data())[:2])
    named = set(re.findall(r"`(\w+)`", PAGE))
    fields = [
        field.name for kind in (vivace.Profile, vivace.Observation) for field in dataclasses.fields(kind)
    ]
    keys = {
        *fields,
        *profile.shares,
        *profile.operator_shares,
        *profile.features,
        *profile.features["loader"],
    }
    assert keys - named == set()
    assert set(plain_profile().features) - named == set()


def test_every_hook_is_in_the_table():
    table = PAGE.partition("\n## Hooks\n")[2].partition("\n## ")[0]
    listed = set(re.findall(r"`(\w+)", "\n".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE))))
    hooks = {name for name in vars(vivace.Technique) if not name.startswith("_")}
    assert hooks - {"settings"} - listed == set()  # `settings` is for those that write plans


def test_every_slot_is_named():
    slots = {cls.card.slot for cls in registry.everything()} - {None}
    assert {slot for slot in slots if f"`{slot}`" not in PAGE} == set()
