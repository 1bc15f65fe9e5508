"""Techniques from elsewhere: a broken one is named and left out, and everything else works."""

import os
import subprocess
import sys

import pytest

import vivace.techniques
from vivace.errors import InputError, PlanError, TechniqueWarning
from vivace.inspection import inspect
from vivace.plan import Plan
from vivace.technique import Card, Numerics, Stage, registry
from vivace.testing.contract import plain_profile

PLUGINS = """
from vivace.technique import Card, Numerics, Stage, Technique

CARD = Card(stage=Stage.MODEL, numerics=Numerics.EXACT, summary="does nothing", source="here")

class Good(Technique):
    card = CARD

class Misspelt(Technique):
    card = CARD

    @classmethod
    def gain(cls, profile, machine):
        return (1.0, profile.shares["dta"])

class Cardless(Technique):
    pass

function = len
"""
POINTS = {
    "my_absent": "no_such_package.module:Technique",
    "my_cardless": "vivace_plugins:Cardless",
    "my_function": "vivace_plugins:function",
    "my_good": "vivace_plugins:Good",
    "my_misspelt": "vivace_plugins:Misspelt",
}
BROKEN = ("my_absent", "my_cardless", "my_function")


def forget():
    registry._entry_points.cache_clear()
    registry._own.cache_clear()


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    """A folder on the path with an installed package of five entry points, of which one is in order."""
    (tmp_path / "vivace_plugins.py").write_text(PLUGINS)
    installed = tmp_path / "vivace_plugins-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: vivace-plugins\nVersion: 1.0\n")
    points = "".join(f"{name} = {target}\n" for name, target in POINTS.items())
    (installed / "entry_points.txt").write_text(f"[{registry.ENTRY_POINTS}]\n{points}")
    monkeypatch.syspath_prepend(tmp_path)
    forget()
    yield tmp_path
    sys.modules.pop("vivace_plugins", None)
    monkeypatch.undo()
    forget()


def test_broken_entry_points_are_named_and_left_out(plugins):
    with pytest.warns(TechniqueWarning) as warned:
        found = {cls.name for cls in registry.everything()}
    assert found == {*registry.own_names(), *registry._registered, "my_good", "my_misspelt"}
    texts = [str(warning.message) for warning in warned]
    assert len(texts) == len(BROKEN)
    for name in BROKEN:
        (text,) = [text for text in texts if f"'{name}' of the package 'vivace-plugins'" in text]
        assert text.endswith("it is left out")
    assert "No module named 'no_such_package'" in texts[0]


@pytest.mark.parametrize("name", BROKEN)
def test_a_plan_that_asks_for_a_broken_technique_is_refused_by_name(plugins, name):
    with pytest.raises(PlanError, match=f"'{name}' of the package 'vivace-plugins'"):
        Plan.from_dict({name: {}})


@pytest.mark.filterwarnings("ignore::vivace.errors.TechniqueWarning")
def test_one_that_cannot_say_what_it_offers_is_left_out_of_the_search(plugins):
    with pytest.warns(TechniqueWarning, match=r"'my_misspelt' cannot say .* KeyError: 'dta' \(.*plugins.py"):
        names = [offer.cls.name for offer in registry.offers(plain_profile(), inspect())]
    assert "my_good" in names
    assert set(registry.own_names()) < set(names)
    assert "my_misspelt" not in names


def test_commands_go_on_without_what_is_broken(plugins):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "vivace", "techniques"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    for name in BROKEN:
        assert f"vivace: the technique '{name}'" in done.stderr
    assert "my_good" in done.stderr
    assert "channels_last" in done.stderr
    assert "Warning" not in done.stderr


def test_a_file_may_hold_what_its_technique_inherits_from(tmp_path, monkeypatch):
    monkeypatch.setattr(vivace.techniques, "__path__", [*vivace.techniques.__path__, str(tmp_path)])
    (tmp_path / "my_family.py").write_text(PLUGINS.partition("class Misspelt")[0] + "class Own(Good): pass\n")
    (tmp_path / "my_twins.py").write_text(PLUGINS)
    forget()
    try:
        assert registry.find("my_family").__name__ == "Own"
        with pytest.raises(PlanError, match=r"'my_twins' must define one .* defines Good, Misspelt"):
            registry.find("my_twins")
        with pytest.warns(TechniqueWarning, match="my_twins"):
            assert registry.find("my_family") in registry.everything()
    finally:
        for name in ("my_family", "my_twins"):
            sys.modules.pop(f"vivace.techniques.{name}", None)
            vars(vivace.techniques).pop(name, None)
        monkeypatch.undo()
        forget()


def test_a_card_declares_no_wider_envelope_than_bfloat16s():
    with pytest.raises(InputError, match=r"0\.00390625 \(bfloat16\) at most, not 0\.25"):
        Card(Stage.MODEL, Numerics.ROUNDING, "weights of three bits", "here", unit_roundoff=0.25)
    Card(Stage.MODEL, Numerics.SEMANTICS, "weights of three bits", "here", unit_roundoff=0.25)
