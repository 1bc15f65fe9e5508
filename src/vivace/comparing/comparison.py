"""`vivace.compare`: the public function."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vivace import words
from vivace.comparing import page
from vivace.comparing.compared import Compared, Difference
from vivace.comparing.sides import KINDS, Side, read
from vivace.errors import InputError
from vivace.files import output_folder
from vivace.job import spelled
from vivace.ledger import Ratio
from vivace.measuring.statistics import FEWEST_BLOCKS, speed_ratio_between
from vivace.reporting import phrases

_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")


def compare(
    before: str | os.PathLike[str],
    after: str | os.PathLike[str],
    *,
    max_regression: str | float | None = None,
    out: str | os.PathLike[str] | None = None,
) -> Compared:
    """What differs between two runs, profiles or records of benchmarks, and is the second slower?

    Args:
        before: a folder of tune, train, run or profile, or a file of one, or a benchmark's record.
        after: the same of what is asked about.
        max_regression: by how much longer a step may take (a sample, where steps have not as many on both
            sides), as ``"5%"`` or 0.05; `Compared.slower` is then the answer. What lies within the noise of
            either run is not slower.
        out: folder for ``compare.html`` and ``compare.json``; left out, none is written.

    Speeds are compared of the same kind of run on the same machine; `Compared.not_comparable` says where that
    is not so. Raises FolderError where a side cannot be read, or `out` not be used or holds a person's own
    files, InputError where `max_regression` is no share.
    """
    allowed = parse_regression(max_regression)
    first, second = read(Path(before)), read(Path(after))
    reason = _not_comparable(first, second)
    ratio, has_interval = (None, False) if reason else _ratio(first, second)
    if ratio is None and not reason:
        lacks = first if first.unit_seconds is None else second
        older = ": an older Vivace wrote it, or no step was seen" if lacks.kind == "script" else ""
        reason = f"'{lacks.path}' holds no time of a step{older}"
    found = Compared(
        before=first,
        after=second,
        differences=tuple(_differences(first, second)),
        ratio=ratio,
        has_interval=has_interval,
        not_comparable=reason,
        notes=tuple(_notes(first, second, ratio is not None and not has_interval)),
        max_regression=allowed,
    )
    return found if out is None else page.write(found, output_folder(Path(out), page.OWN))


def parse_regression(value: str | float | None) -> float | None:
    """``"5%"`` or 0.05 as a share. Raises InputError."""
    if value is None:
        return None
    if isinstance(value, str):
        told = _PERCENT.fullmatch(value.strip())
        share = float(told[1]) / 100 if told else math.nan
    else:
        share = float(value)
    if not 0 <= share < 1:
        raise InputError(f"max_regression is {value!r}; it must be percent below 100, such as 5%")
    return share


def _not_comparable(first: Side, second: Side) -> str:
    """Why the two speeds say nothing of each other; empty where they do."""
    if first.kind != second.kind:
        return f"{KINDS[first.kind]} and {KINDS[second.kind]} are measured in different ways"
    for what, one, other in (
        ("device", first.device, second.device),
        ("cores", first.cores, second.cores),
    ):
        if one and other and one != other:
            return f"other machine ({what}: {one}, then {other})"
    if (first.sample_seconds is None) != (second.sample_seconds is None):
        return "only one of them knows its samples"
    if first.warm_up != second.warm_up:
        whole = first if first.warm_up else second
        return f"'{whole.path}' was too short to tell its steps from its warm-up"
    return ""


def _ratio(first: Side, second: Side) -> tuple[Ratio | None, bool]:
    """How many times faster the second is, and whether that has an interval."""
    one, other = first.unit_seconds, second.unit_seconds
    if one is None or other is None:
        return None, False
    if min(len(first.blocks), len(second.blocks)) >= FEWEST_BLOCKS:
        return speed_ratio_between(first.blocks, second.blocks), True
    estimate = one / other
    if first.bounds is None or second.bounds is None:
        return Ratio(estimate, estimate, estimate), False
    # Two intervals of logarithms around independent estimates add as their squares do.
    slow = math.hypot(math.log(one / first.bounds[0]), math.log(second.bounds[1] / other))
    fast = math.hypot(math.log(first.bounds[1] / one), math.log(other / second.bounds[0]))
    return Ratio(estimate, estimate * math.exp(-slow), estimate * math.exp(fast)), True


def _notes(first: Side, second: Side, without_interval: bool) -> Iterator[str]:
    if first.warm_up and second.warm_up:
        yield "The times of steps hold the warm-up of both, which may be most of them in a short run"
    if without_interval:
        yield "The files hold one figure each and not its noise: the figures are compared as they stand"
    if not (first.device and second.device):
        yield "Not both say which machine they ran on: whether it is the same is for you to know"
    if first.of and second.of and not _is_one(spelled(first.of), spelled(second.of)):
        yield f"They ran different things: {first.of}, then {second.of}"


def _is_one(first: str, second: str) -> bool:
    """May both name one job or command? A path from elsewhere may be the other's from the root."""
    short, long = sorted((first, second), key=len)
    return first == second or (long.startswith("/") and long.endswith(f"/{short}"))


def _differences(first: Side, second: Side) -> Iterator[Difference]:
    """What both hold, and what only one does: speeds, memory, metric, plan, machine, versions."""
    rows = (
        ("time of a step", words.duration, first.step_seconds, second.step_seconds),
        ("time of a sample", words.duration, first.sample_seconds, second.sample_seconds),
        ("samples a second", words.number, _speed(first), _speed(second)),
        ("in all", words.duration, first.total_seconds, second.total_seconds),
        ("peak memory", words.size, first.peak_bytes, second.peak_bytes),
    )
    for name, tell, one, other in rows:
        if one is not None or other is not None:
            yield Difference(name, tell(one), tell(other), words.change(one, other) if one and other else "")
    names = dict.fromkeys((first.metric_name, second.metric_name))
    if first.metric is not None or second.metric is not None:
        row = _told(" / ".join(names), words.number, first.metric, second.metric)
        yield row if len(names) == 1 else dataclasses.replace(row, change="")
    if first.loss is not None or second.loss is not None:
        yield _told("training loss", words.number, first.loss, second.loss)
    beside = dict.fromkeys(
        "beside the script as it is" if side.kind == "script" else "beside strict fp32"
        for side in (first, second)
        if side.plan_speedup is not None
    )
    if beside:
        yield Difference(" / ".join(beside), *(words.ratio(side.plan_speedup) for side in (first, second)))
    if first.plan is not None or second.plan is not None:
        yield Difference("plan", _plan(first), _plan(second), _plan_change(first, second))
    yield from _texts(first, second)


def _told(name: str, tell: Any, one: float | None, other: float | None) -> Difference:
    change = tell(other - one) if one is not None and other is not None and one != other else ""
    return Difference(name, tell(one), tell(other), change)


def _texts(first: Side, second: Side) -> Iterator[Difference]:
    """The machine, and the versions that differ."""
    if first.device or second.device:
        yield Difference("machine", _machine(first), _machine(second))
    for name in dict.fromkeys((*first.versions, *second.versions)):
        one, other = (side.versions.get(name, words.UNKNOWN) for side in (first, second))
        if one != other:
            yield Difference(name, one, other)


def _machine(side: Side) -> str:
    parts = [side.device, words.count(side.cores, "core") if side.cores else ""]
    return ", ".join(filter(None, parts)) or words.UNKNOWN


def _speed(side: Side) -> float | None:
    return 1.0 / side.sample_seconds if side.sample_seconds else None


def _plan(side: Side) -> str:
    if side.plan is None:
        return words.UNKNOWN
    return phrases.plan_name(side.plan) if side.plan else "as it is"


def _plan_change(first: Side, second: Side) -> str:
    """What was taken out (-), added (+) and set otherwise (~)."""
    one: Mapping[str, Any] = first.plan or {}
    other: Mapping[str, Any] = second.plan or {}
    if first.plan is None or second.plan is None:
        return ""
    changes = [f"-{name}" for name in one if name not in other]
    changes += [f"+{name}" for name in other if name not in one]
    changes += [f"~{name}" for name in one if name in other and one[name] != other[name]]
    return " ".join(changes) or "the same"
