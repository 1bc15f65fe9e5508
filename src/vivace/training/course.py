"""What of a job decides the course of its training beside shapes: source, hyper-parameters, schedule."""

from __future__ import annotations

import abc
import ast
import dataclasses
import functools
import hashlib
import inspect
import os
import platform
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy
import torch

from vivace.data.iterable import keeps_state
from vivace.job import Job
from vivace.session.opening import parts_of, schedulers_of
from vivace.tensors.optimizers import IMPLEMENTATION_FLAGS, inner_optimizers
from vivace.torch_internals.modules import INNER_SCHEDULES, inner_schedules

_SOURCE, _PYTHON = "source of ", "python"
_INSIDE = "inner "  # before the name of an optimizer inside of another one
_NOT_SETTINGS = {"params", *IMPLEMENTATION_FLAGS}
_MOST_FILES, _MOST_BYTES, _MOST_LETTERS = 200, 1 << 20, 60
_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


class Fact(abc.ABC):
    """What a Job's functions are given (as arguments of `functools.partial`) and the training depends on."""

    @abc.abstractmethod
    def course(self) -> dict[str, str]:
        """What is compared when a run is resumed, as `course_of` has it; asked once the Job is built."""


def course_of(job: Job, optimizer: object, scheduler: object) -> dict[str, str]:
    """What is compared when a run is resumed, by the words in which a difference is told.

    Of the source counts what Python makes of it: neither comments nor layout. It is that of the files in
    which the Job's functions stand, and of the modules loaded from the same folders.
    """
    found = sources_of(job)
    for given in _given(job):
        found |= given.course() if isinstance(given, Fact) else {}
    for name, one in _optimizers(optimizer):
        for place, group in enumerate(one.param_groups):
            where = _where(name, place, len(one.param_groups))
            found |= {
                f"{where} {key}": _short(value) for key, value in group.items() if key not in _NOT_SETTINGS
            }
    for where, one in _schedules(scheduler):
        found[where] = type(one).__name__
        found |= {f"{where} {key}": _text(value) for key, value in _settings(one).items()}
    words = {"epochs": str(job.epochs), "scheduler_every": job.scheduler_every, "damaged": job.damaged}
    return {**found, **words}


def sources_of(job: Job, whose: str = "") -> dict[str, str]:
    """The digests of the files that a Job consists of, as `course_of` has them; `whose` stands before names.

    Raises nothing: what cannot be read as Python has none.
    """
    paths = _files_of(job)
    found = {f"{_SOURCE}{whose}{_named(path, paths)}": digest for path in paths if (digest := _digest(path))}
    return {_PYTHON: platform.python_version().rpartition(".")[0], **found} if found else {}


def other_python(then: dict[str, str], now: dict[str, str]) -> str:
    """Why sources are not compared: ``Python 3.11 -> 3.12``; empty where they are."""
    versions = [course.get(_PYTHON, "") for course in (then, now)]
    return f"Python {' -> '.join(versions)}" if all(versions) and len(set(versions)) > 1 else ""


def differences(then: dict[str, str], now: dict[str, str]) -> list[str]:
    """What has changed, as ``lr: 0.1 -> 0.2``. A module that only one of both has loaded is no change; nor
    is what another Python makes of the same text, nor an optimizer inside of another one that `then` lacks,
    as earlier versions wrote none of them down.
    """
    found, reads_otherwise = [], other_python(then, now)
    for key in {**then, **now}:
        before, after = then.get(key), now.get(key)
        source = key.startswith(_SOURCE)
        if before == after or key == _PYTHON or (source and (reads_otherwise or None in (before, after))):
            continue
        if before is None and key.startswith(_INSIDE):
            continue
        told = (str(value or "none")[:_MOST_LETTERS] for value in (before, after))
        found.append(key if source else f"{key}: {' -> '.join(told)}")
    return found


def _named(path: Path, paths: list[Path]) -> str:
    """A file's name; of several that have it, with the folders in which they differ."""
    alike = [str(other) for other in paths if other.name == path.name]
    return path.name if len(alike) == 1 else os.path.relpath(path, os.path.commonpath(alike))


def _files_of(job: Job) -> list[Path]:
    given = _given(job)
    files = {_file_of(one) for one in (*given, *_held_by(given))}
    own = {path for path in files if path is not None and _is_persons(path)}  # not the libraries' thousands
    own |= _modules_in(frozenset(f"{path.parent}{os.sep}" for path in own), len(sys.modules))
    return sorted(path for path in own if _is_persons(path))[:_MOST_FILES]


@functools.lru_cache(_MOST_FILES)
def _modules_in(folders: frozenset[str], _: int) -> frozenset[Path]:
    """The files of the modules from these folders, while so many modules are loaded."""
    loaded = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    files = (file for file in loaded if isinstance(file, str) and file.endswith(".py"))
    return frozenset(Path(file) for file in files if file.startswith(tuple(folders)))


def _given(job: Job) -> list[Any]:
    """A Job's functions, and what those that are made of another function and its arguments are given."""
    found, left = [], [getattr(job, field.name) for field in dataclasses.fields(job)]
    while left:
        one = left.pop()
        if isinstance(one, functools.partial):
            left += [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, Job):
            left += [getattr(one, field.name) for field in dataclasses.fields(one)]
        else:
            found.append(one)
    return found


def _held_by(given: list[Any]) -> list[Any]:
    """What functions of Vivace's own are made of, as those of `Job.from_trainer` are of a person's Trainer:
    that, what it consists of, and no further.
    """
    found, left = list[Any](), list(filter(_is_own_function, given))
    while left:
        one = left.pop()
        found.append(one)
        if _is_own_function(one):
            cells = getattr(one, "__closure__", None) or ()
            left += [getattr(one, "__self__", None), *(cell.cell_contents for cell in cells)]
    for _ in range(2):
        things = [one for one in found if not isinstance(one, (type, ModuleType, FunctionType))]
        found += [value for one in things for value in getattr(one, "__dict__", {}).values()]
    return found


def _is_own_function(thing: object) -> bool:
    is_function = isinstance(thing, (FunctionType, MethodType))
    return is_function and str(thing.__module__).startswith("vivace.")


def _file_of(function: Any) -> Path | None:
    try:
        return Path(inspect.getfile(inspect.unwrap(function))).absolute()
    except (TypeError, ValueError, OSError):  # of C, an object with __call__, or a class without a file
        kind = type(function)
        module = sys.modules.get(kind.__module__)
        file = getattr(module, "__file__", None)
        return Path(file).absolute() if file is not None else None


def _is_persons(path: Path) -> bool:
    return path.is_file() and not any(path.is_relative_to(folder) for folder in _LIBRARIES)


def _digest(path: Path) -> str:
    try:
        found = path.stat()
    except OSError:
        return ""
    return _digest_of(path, found.st_mtime_ns, found.st_size)


@functools.lru_cache(_MOST_FILES)
def _digest_of(path: Path, changed_at: int, num_bytes: int) -> str:
    if num_bytes > _MOST_BYTES:
        return ""
    try:
        text = ast.dump(ast.parse(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return ""
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: object) -> bool:
    kinds = (int, float, str, bool, type(None))
    return isinstance(value, kinds) or (
        isinstance(value, (list, tuple)) and all(isinstance(one, kinds) for one in value)
    )


def _is_table(value: object) -> bool:
    """Are these the milestones of a schedule, which are counted, or its phases?"""
    rows = value if isinstance(value, list) else [value]
    return all(isinstance(row, dict) and all(map(_plain, row.values())) for row in rows)


def _text(value: object) -> str:
    if not _is_table(value):
        return _short(value)
    return repr(dict(value) if isinstance(value, dict) else value)


def _short(value: object) -> str:
    if isinstance(value, (torch.Tensor, numpy.generic)):
        value = value.tolist()
    return (repr(value) if _plain(value) else type(value).__name__)[:_MOST_LETTERS]


class Fresh:
    """The hyper-parameters of an optimizer and its schedules before a state is loaded."""

    def __init__(self, optimizer: object, scheduler: object) -> None:
        self._optimizers = _optimizers(optimizer)
        self._schedules = _schedules(scheduler)
        self._states = [_settings(one) for _, one in self._schedules]
        self._groups = [
            [
                {key: value for key, value in group.items() if key not in _NOT_SETTINGS}
                for group in one.param_groups
            ]
            for _, one in self._optimizers
        ]

    def take(self, then: dict[str, str], now: dict[str, str]) -> None:
        """What the person has changed counts from here on, though the loaded state says otherwise.

        A changed learning rate scales the present one and what schedules reckon from.
        """
        changed = {key for key in now if key in then and then[key] != now[key]}
        for (name, one), groups in zip(self._optimizers, self._groups, strict=True):
            for place, fresh in enumerate(groups):
                where = _where(name, place, len(groups))
                for key in fresh:
                    if f"{where} {key}" in changed:
                        self._set(one, place, key, fresh[key], then[f"{where} {key}"])
        for (where, schedule), state in zip(self._schedules, self._states, strict=True):
            if new := {key: state[key] for key in state if f"{where} {key}" in changed}:
                schedule.load_state_dict({**schedule.state_dict(), **new})

    def _set(self, optimizer: torch.optim.Optimizer, place: int, key: str, value: Any, before: str) -> None:
        group = optimizer.param_groups[place]
        if key != "lr" or "None" in (before, str(value)):  # of optimizers that find a rate themselves
            group[key] = value
            return
        ratio = float(value) / float(before) if float(before) else 1.0
        group["lr"] = group["lr"] * ratio if float(before) else value
        if "initial_lr" in group:
            group["initial_lr"] = group["initial_lr"] * ratio
        for _, part in self._schedules:
            rates = getattr(part, "base_lrs", [])
            if getattr(part, "optimizer", None) is optimizer and place < len(rates):
                part.base_lrs = [rate * ratio if at == place else rate for at, rate in enumerate(rates)]


def _optimizers(optimizer: object) -> list[tuple[str, torch.optim.Optimizer]]:
    """All of them by name, the last those inside of others that have hyper-parameters of their own."""
    outer = parts_of(optimizer, torch.optim.Optimizer)
    known = {id(group) for one in outer for group in one.param_groups}
    inside = [one for each in outer for one in inner_optimizers(each).values()]
    inside = [one for one in inside if not known.issuperset(map(id, one.param_groups))]
    named = ((before, enumerate(found)) for before, found in (("", outer), (_INSIDE, inside)))
    return [(f"{before}optimizer{number or ''}", one) for before, found in named for number, one in found]


def _where(name: str, place: int, num_groups: int) -> str:
    return f"{name}{f' group {place}' if num_groups > 1 else ''}"


def _schedules(scheduler: object) -> list[tuple[str, Any]]:
    """All schedules and, behind each, those that it is made of, with the words for each."""
    named = enumerate(filter(keeps_state, schedulers_of(scheduler)))
    return [pair for number, one in named for pair in _with_parts(f"scheduler{number or ''}", one)]


def _with_parts(where: str, schedule: Any) -> Iterator[tuple[str, Any]]:
    yield where, schedule
    for number, part in enumerate(filter(keeps_state, inner_schedules(schedule)), 1):
        yield from _with_parts(f"{where} part {number}", part)


def _settings(schedule: Any) -> dict[str, Any]:
    """What a schedule's state holds beside the parts that it is made of, as far as it can be compared."""
    state = schedule.state_dict()
    return {
        key: value
        for key, value in state.items()
        if key != INNER_SCHEDULES and (_plain(value) or _is_table(value))
    }


def doubt_of_schedule(job: Job, scheduler: object) -> str:
    """What to say of a schedule that is None, or far longer than the epochs in which it is stepped."""
    if job.scheduler is not None and scheduler is None:
        return "the Job's scheduler returned None, so that there is no schedule"
    if job.scheduler_every == "step" or scheduler is None:
        return ""
    parts = schedulers_of(scheduler)
    parts += [inner for part in parts for inner in inner_schedules(part)]
    for part in parts:
        found = (getattr(part, name, 0) for name in ("total_steps", "T_max", "total_iters"))
        longest = max((length for length in found if isinstance(length, int)), default=0)
        if longest >= 10 * job.epochs:
            return (
                f"{type(part).__name__} is {longest:,} steps long and is stepped once an epoch, {job.epochs} "
                'in all: if it counts batches, give the Job scheduler_every="step"'
            )
    return ""
