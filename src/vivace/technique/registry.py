"""Names -> technique classes: Vivace's own files, installed packages' entry points, and `vivace.register`."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import pkgutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from types import ModuleType
from typing import Any, TypeVar

from vivace.blame import blame
from vivace.errors import PlanError, Refused, TechniqueWarning, VivaceError, nearest, ran_out_of_memory
from vivace.ledger import Profile
from vivace.machine import Machine
from vivace.technique import Card, Numerics, Stage, Technique

ENTRY_POINTS = "vivace.techniques"
_registered: dict[str, type[Technique]] = {}

Answer = TypeVar("Answer")
AnyTechnique = TypeVar("AnyTechnique", bound=type[Technique])


def register(cls: AnyTechnique) -> AnyTechnique:
    """Make a technique known under ``cls.name`` in this process; usable as a decorator.

    Raises PlanError where the class lacks a card or a name, the name is Vivace's own, or the card's `after`
    names what is unknown, of another stage, or acts after this one.
    """
    name = getattr(cls, "name", None) or cls.__name__.lower()
    if not isinstance(getattr(cls, "card", None), Card):
        raise PlanError(f"the technique '{name}' has no card: set `card = vivace.Card(...)` on the class")
    if name in own_names():
        raise PlanError(f"the technique name '{name}' is taken by Vivace itself: choose another")
    cls.name = name
    order_of(cls)
    _registered[name] = cls
    return cls


def registered() -> list[type[Technique]]:
    """The classes registered in this process, to be handed on to child processes."""
    return list(_registered.values())


@cache
def _own() -> dict[str, str]:
    """The modules of Vivace's own techniques by name: the files and folders of `vivace/techniques`."""
    folder = "vivace.techniques"
    found = pkgutil.iter_modules(importlib.import_module(folder).__path__)
    return {module.name: f"{folder}.{module.name}" for module in found}


def own_names() -> tuple[str, ...]:
    """The names of Vivace's own techniques, sorted."""
    return tuple(sorted(_own()))


@cache
def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    return {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}


def names() -> list[str]:
    """All known names, sorted."""
    return sorted({*own_names(), *_entry_points(), *_registered})


def find(name: str) -> type[Technique]:
    """The class of a name. Raises PlanError with the nearest known name, or why it cannot be used."""
    cls = _class(name)
    order_of(cls)
    return cls


def order_of(cls: type[Technique], behind: tuple[str, ...] = ()) -> tuple[Stage, int, str]:
    """What a plan is ordered by: the stage, how many act before by `after`, one upon the other, and the name.

    So the order of two techniques is the same in every plan. `behind` holds those that act after this one.
    Raises PlanError as `register` does.
    """
    depth = 0
    behind = (*behind, cls.name)
    for name in cls.card.after:
        if name in behind:
            raise PlanError(f"the technique '{name}' would act after itself: {' after '.join(behind)}")
        if name not in names():
            hint = nearest(name, names())
            raise PlanError(f"the technique '{cls.name}' acts after '{name}', which is unknown{hint}")
        other = _class(name)
        if other.card.stage != cls.card.stage:
            raise PlanError(
                f"the technique '{cls.name}' acts after '{name}', but in the stage {cls.card.stage.name}, "
                f"and '{name}' in {other.card.stage.name}: `after` orders the techniques of one stage"
            )
        depth = max(depth, 1 + order_of(other, behind)[1])
    return cls.card.stage, depth, cls.name


def _class(name: str) -> type[Technique]:
    if name in _registered:
        return _registered[name]
    if name in own_names():
        module = _loaded(name, "", partial(importlib.import_module, _own()[name]))
        cls = _only_class(name, module)
    elif name in _entry_points():
        point = _entry_points()[name]
        package = f" of the package '{point.dist.name}'" if point.dist is not None else ""
        cls = _loaded(name, package, point.load)
        if not (isinstance(cls, type) and issubclass(cls, Technique)):
            raise PlanError(f"the technique '{name}'{package} is no subclass of vivace.Technique")
        if not isinstance(getattr(cls, "card", None), Card):
            raise PlanError(f"the technique '{name}'{package} has no card: set `card = vivace.Card(...)`")
    else:
        raise PlanError(f"unknown technique '{name}'{nearest(name, names())}")
    cls.name = name
    return cls


def _loaded(name: str, package: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except (Exception, SystemExit) as error:
        raise PlanError(
            f"the technique '{name}'{package} cannot be loaded: {type(error).__name__}: {error}"
        ) from error


def _only_class(name: str, module: ModuleType) -> type[Technique]:
    """The technique that a module defines; classes that others of it inherit from are none."""
    own = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
    found = [c for c in own if issubclass(c, Technique) and not any(c in o.__mro__[1:] for o in own)]
    if len(found) != 1:
        named = ", ".join(c.__name__ for c in found) or "none"
        raise PlanError(f"the file of the technique '{name}' must define one technique, and defines {named}")
    return found[0]


def everything() -> list[type[Technique]]:
    """All known classes, in the order of plans. One that cannot be loaded is left out with a
    warning.
    """
    found = []
    for name in names():
        try:
            found.append(find(name))
        except PlanError as error:
            _leave_out(str(error))
    return sorted(found, key=order_of)


def savers(device: str, allow: Numerics) -> list[type[Technique]]:
    """What saves memory on this kind of device and changes numbers no more than allowed; the least first."""
    return [cls for cls in _mildest_first(device, allow) if cls.card.saves_memory]


def lowering_the_peak(device: str, allow: Numerics) -> list[type[Technique]]:
    """What takes less room while a step runs, though that is not what it is for; the least coarse first."""
    return [cls for cls in _mildest_first(device, allow) if cls.card.lowers_peak]


def cutting_batches(device: str) -> list[type[Technique]]:
    """What runs a batch in pieces on this kind of device; the least coarse first."""
    return [cls for cls in _mildest_first(device, Numerics.SEMANTICS) if cls.card.cuts_batches]


def baselines(device: str) -> list[type[Technique]]:
    """What reports show alone on this kind of device, beside what was found."""
    return [cls for cls in _mildest_first(device, Numerics.SEMANTICS) if cls.card.baseline]


def _mildest_first(device: str, allow: Numerics) -> list[type[Technique]]:
    """What acts on this kind of device and changes numbers no more than allowed; the least first."""
    found = [cls for cls in everything() if device in cls.card.devices and cls.card.numerics <= allow]
    return sorted(found, key=lambda cls: (cls.card.numerics, cls.card.unit_roundoff))


@dataclasses.dataclass(frozen=True)
class Offer:
    """What a technique offers for a profiled job: settings worth measuring (its defaults where there are
    none), each once for all that it is to be tried beside, and the bounds of the speed ratio.
    """

    cls: type[Technique]
    candidates: tuple[tuple[Technique, dict[str, dict[str, Any]]], ...]
    default: Technique
    gain: tuple[float, float]


def offers(profile: Profile, machine: Machine) -> list[Offer]:
    """The offer of every known technique. One that fails to say what it offers is left out with a warning."""
    found = []
    for cls in everything():
        try:
            settings = cls.candidates(profile, machine)
            candidates = tuple((one, beside) for one in settings for beside in one.company(profile, machine))
            low, high = cls.gain(profile, machine)
            default = settings[0] if settings else cls()
            found.append(Offer(cls, candidates, default, (float(low), float(high))))
        except Exception as error:
            _leave_out(f"the technique '{cls.name}' cannot say what it offers: {blame(error)}")
    return found


def asked(
    technique: Technique | type[Technique], what: str, ask: Callable[[], Answer], otherwise: Answer
) -> Answer:
    """What a hook of a technique answers; `otherwise`, with a warning, where it raises."""
    try:
        return ask()
    except Exception as error:
        _leave_out(f"the technique '{technique.name}' cannot say {what}: {blame(error)}")
        return otherwise


@contextlib.contextmanager
def acting(technique: Technique) -> Iterator[None]:
    """What a technique refuses while entered bears its name; so does what it fails at, which is a refusal."""
    try:
        yield
    except Refused as refused:
        raise refused.by(technique.name) from None
    except VivaceError:
        raise
    except Exception as error:
        if ran_out_of_memory(error):
            raise
        raise Refused(f"it fails on this job: {blame(error)}").by(technique.name) from error


def rescues(cls: type[Technique]) -> Sequence[Technique]:
    """Its settings that may fit where the job does not; none where it fails to say them."""
    return asked(cls, "what saves memory", cls.rescues, [])


def _leave_out(reason: str) -> None:
    warnings.warn(f"{reason}; it is left out", TechniqueWarning, stacklevel=3)
