"""Ranges as a person writes them."""

import contextlib
import inspect
from typing import Optional

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from vivace.errors import InputError
from vivace.sweeping.space import combinations, range_told, size_of, space_of, told


def job(
    lr: float = 0.1,
    width: int = 64,
    depth: int = 3,
    name="sgd",
    factor=1.0,
    arch: str = "18",
    big=False,
    norm: str | None = None,
    other=(),
    *,
    needed,
):
    """The parameters of a job's function."""


KNOWN = inspect.signature(job).parameters


def read(*ranges, needed="needed=1"):
    return space_of([*ranges, needed], KNOWN)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("lr=1e-4..1e-1:log", FloatDistribution(1e-4, 1e-1, log=True)),
        ("lr=0..1", FloatDistribution(0.0, 1.0)),
        ("factor=1..2", FloatDistribution(1.0, 2.0)),
        ("depth=2..6", IntDistribution(2, 6)),
        ("width=8..512:log", IntDistribution(8, 512, log=True)),
        ("width=32,64,128", CategoricalDistribution([32, 64, 128])),
        ("name=sgd,adam", CategoricalDistribution(["sgd", "adam"])),
        ("other=None,True,0.5,true", CategoricalDistribution([None, True, 0.5, "true"])),
        ("name=18,None", CategoricalDistribution(["18", None])),
        ("arch=18,34", CategoricalDistribution(["18", "34"])),
        ("big=True,False", CategoricalDistribution([True, False])),
        ("norm=None,'none',1e3", CategoricalDistribution([None, "none", "1e3"])),
    ],
)
def test_ranges_are_read_as_written(text, found):
    space, fixed = read(text)
    assert list(space.values()) == [found]
    assert fixed == {"needed": 1}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("lr", "'lr' is no range"),
        ("lr=", "empty choice"),
        ("lr=1..", "no range of numbers"),
        ("lr=1..nan", "no range of numbers"),
        ("lr=2..1", "below the upper"),
        ("lr=1e-4...1e-1:log", "more than two dots between its ends: write lr=1e-4..1e-1:log$"),
        ("factor=0...5", "write factor=0..5$"),
        ("lr=0..1:log", "begins above 0"),
        ("lr=1,2:log", "belongs to a range"),
        ("width=32,32", "twice"),
        ("widthh=32,64", "did you mean 'width'"),
        ("lr=0.1", "nothing is searched"),
        ("lr=0.1-1", "lr is a number, and '0.1-1' is none"),
        ("factor=1,two", "factor is a number, and 'two' is none"),
        ("big=true,false", "'big=true,false': write True, as Python does, instead of true$"),
        ("big=FALSE", "write False, as Python does"),
        ("big=yes,no", "big is True or False, and 'yes' is neither"),
        ("norm=none,batch", 'write None, as Python does, instead of none, or "none" in quotes'),
        ("arch=18..34", "arch is a text, and a range is of numbers: write arch=18,34"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(text, sentence):
    with pytest.raises(InputError, match=sentence):
        read(text)


@pytest.mark.parametrize("text", ["0.0001..0.1:log", "0.0..1.0", "2..6", "32,64,128", "sgd,None,0.5"])
def test_a_range_is_told_as_it_is_written(text):
    name = "other" if "sgd" in text else "depth" if text == "2..6" else "width" if "32" in text else "lr"
    (found,) = read(f"{name}={text}")[0].values()
    assert range_told(found) == text


def test_a_parameter_without_a_default_needs_a_value():
    with pytest.raises(InputError, match="no default for 'needed'"):
        space_of(["lr=0..1"], KNOWN)


def test_a_name_is_given_once():
    with pytest.raises(InputError, match="given twice"):
        read("lr=0..1", "lr=1..2")


def test_distributions_and_plain_values_are_taken_as_they_are():
    space, fixed = space_of(
        {"lr": FloatDistribution(0.1, 1.0), "width": 32, "needed": IntDistribution(4, 4)}, KNOWN
    )
    assert space == {"lr": FloatDistribution(0.1, 1.0)}
    assert fixed == {"width": 32, "needed": 4}


@pytest.mark.parametrize(
    ("space", "sentence"),
    [
        ({"lr": (0.1, 1.0), "needed": 1}, r"lr=\(0.1, 1.0\) is neither a range nor one value"),
        ("lr=0..1", "or a list such as .* not 'lr=0..1'"),
        (None, "not None"),
        ([0.1], "'0.1' is no range"),
    ],
)
def test_a_space_of_the_wrong_kind_is_one_sentence(space, sentence):
    with pytest.raises(InputError, match=sentence):
        space_of(space, KNOWN)


def test_a_choice_that_a_journal_would_give_back_as_another_is_refused():
    with pytest.warns(UserWarning, match="persistent storage"):
        pairs = CategoricalDistribution([(1, 2), (3, 4)])
    with pytest.raises(InputError, match=r"width: a choice is a number, .* not \(1, 2\)"):
        space_of({"width": pairs, "needed": 1}, KNOWN)


@pytest.mark.parametrize("annotation", [float | None, Optional[float], "float | None"])  # noqa: UP045
def test_a_range_of_a_real_number_or_none_is_of_real_numbers(annotation):
    def job(decay=None):
        """The parameters of a job's function."""

    job.__annotations__["decay"] = annotation
    known = inspect.signature(job).parameters
    assert space_of(["decay=0..1"], known)[0] == {"decay": FloatDistribution(0.0, 1.0)}
    with pytest.raises(InputError, match="decay is a number, and 'l2' is none"):
        space_of(["decay=None,l2"], known)


def test_numpys_numbers_are_given_as_the_journal_gives_them_back():
    choices = list(numpy.logspace(-3, -1, 3))
    space, fixed = space_of(
        {"lr": CategoricalDistribution(choices), "factor": choices[0], "needed": 1}, KNOWN
    )
    assert {type(one) for one in (*space["lr"].choices, fixed["factor"])} == {float}


def test_sizes_of_spaces():
    assert size_of(read("width=32,64", "depth=2..6")[0]) == 10
    assert size_of(read("lr=0..1")[0]) == float("inf")


def test_all_combinations_are_those_that_optuna_draws_and_never_held_together():
    space = {"width": CategoricalDistribution([4, 8]), "decay": FloatDistribution(0, 0.3, step=0.1)}
    found = list(combinations(space))
    assert len(found) == size_of(space) == 8
    assert all(space["decay"]._contains(one["decay"]) for one in found)
    many = combinations({"needed": IntDistribution(0, 10**15), "depth": IntDistribution(0, 10**15)})
    assert [next(many), next(many)] == [{"needed": 0, "depth": 0}, {"needed": 0, "depth": 1}]


def test_parameters_are_told_with_three_digits():
    assert told({"lr": 0.0123456, "width": 64, "name": "sgd"}) == "lr=0.0123, width=64, name=sgd"
    assert told({"bias": -0.5, "shift": -1234.5}) == "bias=-0.5, shift=-1.23e+03"
    assert told({"lr": 12345.6, "steps": 12345, "huge": 1.9e23}) == "lr=1.23e+04, steps=12345, huge=1.9e+23"


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=30))
def test_any_text_is_read_or_refused(text):
    with contextlib.suppress(InputError):
        space, _ = read(text)
        assert len(space) == 1
