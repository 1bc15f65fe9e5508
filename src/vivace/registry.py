"""Names -> technique classes: Vivace's own files, installed packages' entry points, and `vivace.register`."""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
from functools import cache
from typing import TypeVar

from vivace.errors import PlanError, nearest
from vivace.technique import Card, Technique

ENTRY_POINTS = "vivace.techniques"
_registered: dict[str, type[Technique]] = {}

AnyTechnique = TypeVar("AnyTechnique", bound=type[Technique])


def register(cls: AnyTechnique) -> AnyTechnique:
    """Make a technique known under ``cls.name`` in this process; usable as a decorator.

    Raises PlanError where the class lacks a card or a name, or the name is Vivace's own.
    """
    name = getattr(cls, "name", None) or cls.__name__.lower()
    if not isinstance(getattr(cls, "card", None), Card):
        raise PlanError(f"the technique '{name}' has no card: set `card = vivace.Card(...)` on the class")
    if name in own_names():
        raise PlanError(f"the technique name '{name}' is taken by Vivace itself: choose another")
    cls.name = name
    _registered[name] = cls
    return cls


def registered() -> list[type[Technique]]:
    """The classes registered in this process, to be handed on to child processes."""
    return list(_registered.values())


@cache
def own_names() -> tuple[str, ...]:
    """The names of Vivace's own techniques: the files of `vivace/techniques`."""
    package = importlib.import_module("vivace.techniques")
    return tuple(sorted(module.name for module in pkgutil.iter_modules(package.__path__)))


@cache
def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    return {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}


def names() -> list[str]:
    """All known names, sorted."""
    return sorted({*own_names(), *_entry_points(), *_registered})


def find(name: str) -> type[Technique]:
    """The class of a name. Raises PlanError with the nearest known name."""
    if name in _registered:
        return _registered[name]
    if name in own_names():
        module = importlib.import_module(f"vivace.techniques.{name}")
        found = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
        (cls,) = [c for c in found if issubclass(c, Technique)]
    elif name in _entry_points():
        cls = _entry_points()[name].load()
    else:
        raise PlanError(f"unknown technique '{name}'{nearest(name, names())}")
    cls.name = name
    return cls


def everything() -> list[type[Technique]]:
    """All known classes, in the order of stages, then names."""
    return sorted((find(name) for name in names()), key=lambda cls: (cls.card.stage, cls.name))
