"""Plan: a canonical set of techniques and settings. It says what to do, never why; torch-free."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tomlkit
from pydantic import TypeAdapter, ValidationError

from vivace.errors import PlanError, nearest
from vivace.files import replace_text
from vivace.pages.answer import Answer
from vivace.technique import Numerics, Stage, Technique, registry

FORMAT = 1
_HEADER = "# vivace plan - what to do. Evidence is in the ledger beside it.\n"


class Plan:
    """An immutable set of techniques in canonical order: stage, then `after`, then name.

    Equal plans have equal ids.
    """

    def __init__(self, techniques: Iterable[Technique] = ()) -> None:
        ordered = sorted(techniques, key=lambda t: registry.order_of(type(t)))
        _refuse_conflicts(ordered)
        self.techniques: tuple[Technique, ...] = tuple(ordered)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan file. Raises `PlanError` naming the file, the line and what would be right."""
        file = Path(path)
        try:
            if file.is_dir():
                file = file / "plan.toml"
            text = file.read_text(encoding="utf-8-sig")  # some editors write a mark before the first letter
        except FileNotFoundError:
            raise PlanError(f"there is no plan file '{path}'") from None
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"the plan file '{path}' cannot be read: {error}") from None
        return cls.loads(text, str(file))

    @classmethod
    def loads(cls, text: str, where: str = "plan") -> Plan:
        """Read a plan from TOML text; `where` stands in the messages of `PlanError`."""
        try:
            document = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # also for numbers too long, and lists too deep to read
            raise PlanError(f"{where} is not valid TOML: {error}") from None
        version = document.pop("format", None)
        if version != FORMAT or version is True:
            found = "no format" if version is None else f"format {version!r}"
            raise PlanError(f"{where} has {found}; this Vivace reads format {FORMAT}")
        tables = document.pop("techniques", {})
        if document:
            key = next(iter(document))
            raise PlanError(
                f"{where}{_line(text, key)}: unknown key '{key}'; a plan has 'format' and [techniques.NAME]"
            )
        if not isinstance(tables, dict):
            raise PlanError(f"{where}: 'techniques' must be tables such as [techniques.channels_last]")
        return cls(_read_technique(name, settings, text, where) for name, settings in tables.items())

    @classmethod
    def from_dict(cls, document: dict[str, dict[str, Any]]) -> Plan:
        """Build a plan from ``{technique name: settings}``."""
        return cls(_read_technique(name, settings, "", "plan") for name, settings in document.items())

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """``{technique name: settings that differ from their defaults}``, in canonical order."""
        return {technique.name: technique.settings() for technique in self.techniques}

    def dumps(self) -> str:
        """The canonical TOML text: equal plans give equal text. Raises `PlanError` for what TOML has not."""
        return self._text

    @functools.cached_property  # plans are compared and looked up thousands of times in a search
    def _text(self) -> str:
        parts = [_HEADER, f"format = {FORMAT}\n"]
        for name, settings in self.to_dict().items():
            parts.append(f"\n[techniques.{tomlkit.key(name).as_string()}]\n")
            parts += [f"{key} = {_toml(name, key, value)}\n" for key, value in sorted(settings.items())]
        return "".join(parts)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the canonical text to `path`, replacing it whole or not at all. Raises FolderError."""
        replace_text(Path(path), self.dumps())

    @functools.cached_property
    def id(self) -> str:
        """Twelve hexadecimal digits of the canonical text's sha256."""
        return hashlib.sha256(self.dumps().encode()).hexdigest()[:12]

    @property
    def names(self) -> tuple[str, ...]:
        """The techniques' names in canonical order."""
        return tuple(technique.name for technique in self.techniques)

    @property
    def does(self) -> dict[str, str]:
        """What each technique does, in its card's words."""
        return {technique.name: technique.card.summary for technique in self.techniques}

    @property
    def promise(self) -> Numerics:
        """The largest change of numbers that the plan admits, from its cards alone."""
        return max((technique.card.numerics for technique in self.techniques), default=Numerics.EXACT)

    @property
    def unit_roundoff(self) -> float:
        """The coarsest unit roundoff that its techniques declare; 0 for an exact plan."""
        return max((technique.card.unit_roundoff for technique in self.techniques), default=0.0)

    @property
    def precision(self) -> Plan:
        """The part of the plan that lowers precision, alone."""
        return Plan(t for t in self.techniques if t.card.stage == Stage.PRECISION)

    @property
    def compiles(self) -> bool:
        """Is the step compiled?"""
        return any(technique.card.compiles for technique in self.techniques)

    @property
    def is_opaque(self) -> bool:
        """Does the step run code that no dispatch mode sees, or that would be compiled anew under one?"""
        return self.compiles or any(technique.card.captures for technique in self.techniques)

    def diff(self, other: Plan) -> list[str]:
        """What turns this plan into `other`: lines starting with ``-``, ``+`` or ``~``."""
        mine, theirs = self.to_dict(), other.to_dict()
        lines = [f"- {name}" for name in mine if name not in theirs]
        lines += [f"+ {name}" for name in theirs if name not in mine]
        for name in mine:
            if name in theirs and mine[name] != theirs[name]:
                lines.append(f"~ {name}: {mine[name] or 'defaults'} -> {theirs[name] or 'defaults'}")
        return lines

    def adding(self, technique: Technique) -> Plan:
        """This plan with `technique`, which displaces one of the same name or slot.

        What compiles, and what acts on uncompiled code alone, displace each other, too.
        """
        slot, card = technique.slot, technique.card
        kept = [t for t in self.techniques if t.name != technique.name and (slot is None or t.slot != slot)]
        kept = [t for t in kept if not (t.card.compiles and card.uncompiled)]
        kept = [t for t in kept if not (t.card.uncompiled and card.compiles)]
        return Plan([*kept, technique])

    def without(self, name: str) -> Plan:
        """This plan less the technique called `name`."""
        return Plan(t for t in self.techniques if t.name != name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.dumps() == other.dumps()

    def __hash__(self) -> int:
        return hash(self.dumps())

    def __len__(self) -> int:
        return len(self.techniques)

    def __str__(self) -> str:
        return " + ".join(self.names) or "reference"

    def __repr__(self) -> str:
        return f"Plan({self}, id={self.id})"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from vivace.pages.render import card  # only then: a template engine

        sentence = f"It may change numbers by {self.promise.name}" if len(self) else "The job as it is"
        answer = Answer(
            command="plan", subject=self.id, sentence=sentence, tone="plain", parts=tuple(self.does.items())
        )
        return card(answer)


def _toml(name: str, key: str, value: object) -> str:
    """A setting in one line. A table or a list can be changed, and a plan cannot: it is refused, too."""
    try:
        hash(value)
        return tomlkit.item(value).as_string()
    except (TypeError, ValueError):
        raise PlanError(
            f"'{name}' cannot have {key} = {value!r}: a setting is a text, a number, true, false or a tuple "
            "of these; one that may be None has None as its default"
        ) from None


def _refuse_conflicts(techniques: list[Technique]) -> None:
    seen: dict[str, str] = {}
    for technique in techniques:
        for key in filter(None, ("name " + technique.name, technique.slot)):
            if key in seen:
                raise PlanError(f"'{technique.name}' and '{seen[key]}' exclude each other ({key}): keep one")
            seen[key] = technique.name


def _read_technique(name: str, settings: object, text: str, where: str) -> Technique:
    if name not in registry.names():
        raise PlanError(
            f"{where}{_line(text, name)}: unknown technique '{name}'{nearest(name, registry.names())}"
        )
    cls = registry.find(name)
    if not isinstance(settings, dict):
        raise PlanError(f"{where}{_line(text, name)}: write [techniques.{name}] with its settings below")
    known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key, value in settings.items():
        if key not in known:
            hint = nearest(key, known) or (
                f"; it has {', '.join(known)}" if known else "; it has no settings"
            )
            raise PlanError(f"{where}{_line(text, name, key)}: '{name}' has no setting '{key}'{hint}")
        if isinstance(value, float) and not math.isfinite(value):
            told = f"'{name}' cannot have {key} = {value}: write a finite number"
            raise PlanError(f"{where}{_line(text, name, key)}: {told}")
    try:
        return TypeAdapter(cls).validate_json(json.dumps(settings, default=str), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0]) if first["loc"] else name
        message = first["msg"][0].lower() + first["msg"][1:]
        raise PlanError(
            f"{where}{_line(text, name, key)}: '{name}' cannot have {key} = {first['input']!r}: {message}"
        ) from None


def _line(text: str, *path: str) -> str:
    """``, line N`` of the last word of `path`, each looked for after the one before; empty if not found."""
    number, lines = 0, text.splitlines()
    for word in path:
        pattern = re.compile(rf"(^|[\[.\s\"']){re.escape(word)}($|[\]\s=\"'.])")
        hits = [i for i in range(number, len(lines)) if pattern.search(lines[i].split("#")[0])]
        if not hits:
            return ""
        number = hits[0]
    return f", line {number + 1}" if path and lines else ""
