"""What is searched: ranges as a person writes them, and as Optuna's distributions."""

from __future__ import annotations

import ast
import inspect
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from optuna import distributions
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from vivace.errors import InputError, nearest
from vivace.words import number

Space = dict[str, BaseDistribution]
Parameters = dict[str, Any]

_LOGARITHMIC = ":log"
_PLAIN = (int, float, str, bool, type(None))
_KINDS = {"int", "float", "bool", "str", "None"}
_NONE = {"NoneType", "Optional"}  # other names of None in an annotation
_CONSTANTS = {"true": "True", "false": "False", "none": "None", "null": "None"}  # by what others write
_FORMS = "lr=1e-4..1e-1:log, depth=2..6, width=32,64,128 or momentum=0.9"


def space_of(
    given: Mapping[str, Any] | Sequence[str], known: Mapping[str, inspect.Parameter]
) -> tuple[Space, Parameters]:
    """Distributions by the job's parameters, and the values of those that are fixed.

    Args:
        given: names with ranges as texts, Optuna's distributions or plain values; or ``name=range`` texts.
        known: the parameters of the job's function.

    Raises InputError where a range cannot be read, or the job has no such parameter.
    """
    space, fixed = Space(), Parameters()
    for name, found in _pairs(given):
        if name not in known:
            hint = nearest(name, known) or f"; it has {', '.join(known) or 'none'}"
            raise InputError(f"the job's function has no parameter '{name}'{hint}")
        if isinstance(found, str):
            found = _read(name, found, known[name])
        if isinstance(found, _PLAIN):
            fixed[name] = _plain(found)
        elif not isinstance(found, BaseDistribution):
            raise InputError(
                f"{name}={found!r} is neither a range nor one value: write {_FORMS}, or one of Optuna's "
                "distributions"
            )
        elif wrong := [one for one in _choices(found) if not isinstance(one, _PLAIN)]:
            raise InputError(
                f"{name}: a choice is a number, a text, True, False or None, not {wrong[0]!r}, which the "
                "sweep's journal would give back as something else"
            )
        elif found.single():
            fixed[name] = _plain(_only(found))
        elif isinstance(found, CategoricalDistribution):
            space[name] = CategoricalDistribution([_plain(one) for one in found.choices])
        else:
            space[name] = found
    if not space:
        raise InputError(f"nothing is searched: give at least one range, such as {_FORMS}")
    empty = inspect.Parameter.empty
    missing = [n for n, p in known.items() if p.default is empty and n not in space and n not in fixed]
    if missing:
        raise InputError(
            f"the job's function has no default for '{missing[0]}': give it a value, such as {_FORMS}"
        )
    return space, fixed


def _pairs(given: Mapping[str, Any] | Sequence[str]) -> list[tuple[str, Any]]:
    if isinstance(given, Mapping):
        return list(given.items())
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise InputError(
            f"what is searched is a mapping of names to ranges, or a list such as ['lr=1e-4..1e-1:log'], not "
            f"{given!r}"
        )
    found: dict[str, Any] = {}
    for text in map(str, given):
        name, equals, told = text.partition("=")
        if not equals or not name.isidentifier():
            raise InputError(f"'{text}' is no range: write name=range, such as {_FORMS}")
        if name in found:
            raise InputError(f"'{name}' is given twice: {name}={found[name]} and {text}")
        found[name] = told
    return list(found.items())


def _read(name: str, text: str, parameter: inspect.Parameter) -> Any:
    """The distribution, or the one value, of a range as a text."""
    told = text.removesuffix(_LOGARITHMIC)
    logarithmic = told != text
    if ".." in told:
        return _between(name, text, told, logarithmic, parameter)
    if logarithmic:
        raise InputError(f"'{name}={text}': {_LOGARITHMIC} belongs to a range such as 1e-4..1e-1:log")
    kinds = _kinds_of(parameter)
    parts = [part.strip() for part in told.split(",")]
    choices = [_value(part) for part in parts]
    if kinds - {"None"} == {"str"}:
        choices = [p if type(one) in (int, float) else one for p, one in zip(parts, choices, strict=True)]
    if any(choice == "" for choice in choices):
        raise InputError(f"'{name}={text}' has an empty choice: write {_FORMS}")
    if len(set(map(repr, choices))) < len(choices):
        raise InputError(f"'{name}={text}' names a choice twice")
    _require_values(
        name, text, [part for part, one in zip(parts, choices, strict=True) if isinstance(one, str)], kinds
    )
    return choices[0] if len(choices) == 1 else CategoricalDistribution(choices)


def _require_values(name: str, text: str, words: list[str], kinds: set[str]) -> None:
    """Raises InputError where one of the words is no value of a parameter of these kinds."""
    for word in words:
        right = _CONSTANTS.get(word.lower(), "")
        if ("None" if right == "None" else "bool") in kinds and right:
            quoted = f', or "{word}" in quotes of its own for the text' if kinds <= {"None", "str"} else ""
            raise InputError(f"'{name}={text}': write {right}, as Python does, instead of {word}{quoted}")
        if kinds & {"int", "float"} and "str" not in kinds:
            raise InputError(f"'{name}={text}': {name} is a number, and '{word}' is none: write {_FORMS}")
        if "bool" in kinds and "str" not in kinds:
            raise InputError(f"'{name}={text}': {name} is True or False, and '{word}' is neither")


def _between(
    name: str, text: str, told: str, logarithmic: bool, parameter: inspect.Parameter
) -> BaseDistribution:
    low, high = (_value(end.strip()) for end in told.split("..", 1))
    if not all(isinstance(end, int | float) and not isinstance(end, bool) for end in (low, high)):
        raise InputError(f"'{name}={text}' is no range of numbers: write {_FORMS}")
    if "..." in told:  # the third dot would make a tenth of 1e-1
        right = re.sub(r"\.{3,}", "..", text)
        raise InputError(f"'{name}={text}' has more than two dots between its ends: write {name}={right}")
    if _kinds_of(parameter) - {"None"} == {"str"}:
        raise InputError(
            f"'{name}={text}': {name} is a text, and a range is of numbers: write {name}={low},{high}"
        )
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise InputError(f"'{name}={text}': the lower end must be below the upper, and {number(low)} is not")
    if logarithmic and low <= 0:
        raise InputError(f"'{name}={text}': a logarithmic range begins above 0, not at {low}")
    if isinstance(low, int) and isinstance(high, int) and not _takes_reals(parameter):
        return IntDistribution(low, high, log=logarithmic)
    return FloatDistribution(float(low), float(high), log=logarithmic)


def _takes_reals(parameter: inspect.Parameter) -> bool:
    """Does the function's default or annotation say that a whole number stands for a real one?"""
    return isinstance(parameter.default, float) or _kinds_of(parameter) - {"None"} == {"float"}


def _kinds_of(parameter: inspect.Parameter) -> set[str]:
    """The kinds of value in the function's annotation, as ``float | None`` has two, or without one that of
    its default; empty where others are among them.
    """
    found = parameter.annotation
    if found is parameter.empty:
        found = type(parameter.default)
    names = {found.__name__} if isinstance(found, type) else set(re.findall(r"\w+", str(found)))
    kinds = {"None" if name in _NONE else name for name in names - {"Union", "typing"}}
    return kinds if kinds <= _KINDS else set()


def _plain(value: Any) -> Any:
    """A value as the journal gives it back, and as trials get it: NumPy's float, too, is a number then."""
    return json.loads(json.dumps(value))


def _value(text: str) -> Any:
    """A number, True, False, None or a quoted text as Python writes them; anything else is a plain text."""
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return found if isinstance(found, int | float | str | bool | None) else text


def _choices(found: BaseDistribution) -> Sequence[Any]:
    return found.choices if isinstance(found, CategoricalDistribution) else ()


def _only(found: BaseDistribution) -> Any:
    return found.choices[0] if isinstance(found, CategoricalDistribution) else found.low  # type: ignore[attr-defined]


def size_of(space: Space) -> float:
    """How many combinations there are; infinite with a range of real numbers without steps."""
    sizes = []
    for found in space.values():
        if isinstance(found, CategoricalDistribution):
            sizes.append(float(len(found.choices)))
        elif isinstance(found, IntDistribution | FloatDistribution) and found.step is not None:
            sizes.append(math.floor((found.high - found.low) / found.step + 1e-9) + 1.0)
        else:
            sizes.append(math.inf)
    return math.prod(sizes)


def combinations(space: Space) -> Iterator[Parameters]:
    """All of a space that has an end, one after another: they may be too many to hold."""
    if not space:
        yield {}
        return
    name, *others = space
    for value in _values_in(space[name]):
        for rest in combinations({other: space[other] for other in others}):
            yield {name: value, **rest}


def _values_in(found: BaseDistribution) -> Iterator[Any]:
    """All values of a choice, or of a range in steps, as Optuna computes them."""
    if isinstance(found, CategoricalDistribution):
        yield from found.choices
        return
    assert isinstance(found, IntDistribution | FloatDistribution)
    assert found.step is not None
    for count in range(int(size_of({"": found}))):
        yield min(found.low + found.step * count, found.high)


def to_dict(space: Space) -> dict[str, Any]:
    """The space as JSON types: what makes two sweeps the same."""
    return {name: distributions.distribution_to_json(found) for name, found in space.items()}


def range_told(found: object) -> str:
    """A distribution or a value as a person writes it: ``0.0001..0.1:log``, ``2..6`` or ``32,64,128``."""
    if isinstance(found, CategoricalDistribution):
        return ",".join(map(str, found.choices))
    if not isinstance(found, IntDistribution | FloatDistribution):
        return str(found)
    step = "" if found.step in (None, 1) else f" in steps of {found.step}"
    return f"{found.low}..{found.high}{_LOGARITHMIC if found.log else ''}{step}"


def told(parameters: Mapping[str, Any]) -> str:
    """Parameters as a person reads them: ``lr=0.0123, width=64``."""
    return ", ".join(f"{name}={value_told(value)}" for name, value in parameters.items())


def value_told(value: object) -> str:
    """A parameter's value: whole numbers and texts as they are, others with three digits.

    No comma parts thousands, and the minus is the keyboard's: parameters stand in lists, and are typed again.
    """
    if not isinstance(value, float):
        return str(value)
    if not abs(value) < 999.5:
        return f"{value:.3g}"
    return f"{'-' if value < 0 else ''}{number(abs(value))}"
