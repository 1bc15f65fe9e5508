"""Plans: canonical text, refusals that name the line, and the laws of a set."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vivace.errors import PlanError
from vivace.plan import Plan
from vivace.technique import Numerics, Technique, registry

ALL = [cls() for cls in registry.everything()]


def _plan(techniques):
    plan = Plan()
    for technique in techniques:
        plan = plan.adding(technique)
    return plan


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(ALL), max_size=8), st.randoms())
def test_a_plan_is_a_set_whose_text_is_canonical(techniques, random):
    plan = _plan(techniques)
    shuffled = list(plan.techniques)
    random.shuffle(shuffled)
    again = Plan(shuffled)
    assert again == plan
    assert again.id == plan.id
    assert Plan.loads(plan.dumps()).dumps() == plan.dumps()
    assert plan.diff(again) == []
    assert plan.promise == max([t.card.numerics for t in plan.techniques], default=Numerics.EXACT)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(ALL), max_size=6), st.lists(st.sampled_from(ALL), max_size=6))
def test_diff_names_what_turns_one_plan_into_the_other(first, second):
    a, b = _plan(first), _plan(second)
    lines = a.diff(b)
    added = {line[2:] for line in lines if line.startswith("+ ")}
    removed = {line[2:] for line in lines if line.startswith("- ")}
    assert (set(a.names) - removed) | added == set(b.names)


def test_a_difference_is_told_in_the_order_of_the_plan():
    """As in the reason of a trial, which is to be the same in each run."""
    changes = [(cls(), found) for cls in registry.everything() if (found := _changed(cls)) is not None]
    one, other = (Plan(each) for each in zip(*changes, strict=True))
    assert len(one) > 4
    assert [line.split()[1].rstrip(":") for line in one.diff(other)] == list(one.names)


def _changed(cls):
    """With another setting, of what shares no slot; None where it has none that any value suits."""
    if cls.card.slot is None and cls().slot is None:
        for field in dataclasses.fields(cls):
            if type(field.default) is int:
                return cls(**{field.name: field.default + 1})
    return None


def test_a_technique_of_the_same_slot_is_displaced():
    plan = _plan([registry.find("bf16_autocast")()]).adding(registry.find("fp16_autocast")())
    assert plan.names == ("fp16_autocast",)


@pytest.mark.parametrize("name", ["vectorized_dropout", "vectorized_operators"])
def test_what_acts_on_uncompiled_code_and_what_compiles_displace_each_other(name):
    others = _plan([registry.find("bf16_autocast")(), registry.find("host_allocator")()])
    uncompiled, compiled = registry.find(name)(), registry.find("compile")()
    assert others.adding(uncompiled).adding(compiled) == others.adding(compiled)
    assert others.adding(compiled).adding(uncompiled) == others.adding(uncompiled)
    both = _plan([registry.find("vectorized_dropout")(), registry.find("vectorized_operators")()])
    assert len(both) == 2
    assert both.adding(compiled).names == ("compile",)


def test_a_plan_file_may_have_both():
    text = "format = 1\n[techniques.vectorized_operators]\n[techniques.compile]\n"
    assert Plan.loads(text).names == ("vectorized_operators", "compile")


def test_two_techniques_of_one_slot_are_refused():
    with pytest.raises(PlanError, match=r"'fp16_autocast' and 'bf16_autocast' exclude each other"):
        Plan.loads("format = 1\n[techniques.bf16_autocast]\n[techniques.fp16_autocast]\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("format = 2\n", "has format 2; this Vivace reads format 1"),
        ("format = true\n", "has format True; this Vivace reads format 1"),
        ("", "has no format; this Vivace reads format 1"),
        (
            "format = 1\n\n[techniques.chanels_last]\n",
            "line 3: unknown technique 'chanels_last'; did you mean 'channels_last'",
        ),
        (
            "format = 1\n[techniques.compile]\nmodus = 'x'\n",
            "line 3: 'compile' has no setting 'modus'; did you mean 'mode'",
        ),
        (
            "format = 1\n[techniques.compile]\n\nmode = 'fast'\n",
            "line 4: 'compile' cannot have mode = 'fast'",
        ),
        (
            "format = 1\n[techniques.micro_batches]\nnum = '4'\n",
            "line 3: 'micro_batches' cannot have num = '4'",
        ),
        ("format = 1\n[techniques.micro_batches]\nnum = 1\n", "line 3: 'micro_batches' cannot have num = 1"),
        ("format = 1\n[technique.compile]\n", "line 2: unknown key 'technique'"),
        ("format = 1\n[techniques]\ncompile = 3\n", "line 3: write [techniques.compile]"),
        ("format = \n", "is not valid TOML"),
        (f"format = {'9' * 5000}\n", "is not valid TOML"),
        (f"format = {'[' * 5000}\n", "is not valid TOML"),
        (
            "format = 1\n[techniques.fp16_autocast]\ninitial_scale = inf\n",
            "line 3: 'fp16_autocast' cannot have initial_scale = inf: write a finite number",
        ),
    ],
)
def test_bad_plans_are_refused_with_their_line(text, message, tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_missing_and_unreadable_plans(tmp_path):
    with pytest.raises(PlanError, match="there is no plan file"):
        Plan.load(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    for unreadable in (tmp_path / "binary.toml", "a" * 300):
        with pytest.raises(PlanError, match="cannot be read"):
            Plan.load(unreadable)


def test_a_mark_before_the_first_letter_is_none_of_the_plan(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text("format = 1\n[techniques.channels_last]\n", encoding="utf-8-sig")
    assert Plan.load(path).names == ("channels_last",)


def test_a_name_that_toml_would_read_as_several_is_quoted(register):
    @dataclasses.dataclass(frozen=True)
    class Own(Technique):
        name = "lab.own technique"
        card = registry.find("channels_last").card
        rate: int = 1

    register(Own)
    plan = Plan([Own(rate=3)])
    assert Plan.loads(plan.dumps()) == plan


@pytest.fixture
def lab(register):
    """A technique of a person's own, whose settings need not be what a plan can hold."""

    @dataclasses.dataclass(frozen=True)
    class Lab(Technique):
        name = "lab"
        card = registry.find("channels_last").card
        names: tuple[str, ...] = ()
        size: int | None = None
        depth: Any = 4

    register(Lab)
    return Lab


@pytest.mark.parametrize("settings", [{}, {"names": ("p", "q"), "size": 3}, {"size": None, "depth": 2.5}])
def test_settings_survive_the_plan_file(lab, settings):
    plan = Plan([lab(**settings)])
    assert Plan.loads(plan.dumps()) == plan


@pytest.mark.parametrize("depth", [None, {}, {"a": 1}, [1], (1, None), b"x", {1}, ({"a": 1},), object])
def test_a_setting_that_no_plan_can_hold_is_refused_by_name(lab, depth):
    with pytest.raises(PlanError) as told:
        Plan([lab(depth=depth)]).dumps()
    assert str(told.value).startswith(f"'lab' cannot have depth = {depth!r}: a setting is a text, a number, ")


def test_a_table_is_refused_as_a_default_too(register):
    @dataclasses.dataclass(frozen=True)
    class Lab(Technique):
        name = "lab"
        card = registry.find("channels_last").card
        table: dict[str, int] = dataclasses.field(default_factory=dict)

    register(Lab)
    with pytest.raises(PlanError, match=r"'lab' cannot have table = \{\}"):
        Plan([Lab()]).dumps()


def test_saving_is_whole_and_a_folder_holds_its_plan(tmp_path):
    plan = _plan([registry.find("compile")(mode="max-autotune-no-cudagraphs")])
    plan.save(tmp_path / "plan.toml")
    assert Plan.load(tmp_path) == plan
    assert [p.name for p in tmp_path.iterdir()] == ["plan.toml"]
    assert 'mode = "max-autotune-no-cudagraphs"' in (tmp_path / "plan.toml").read_text()
