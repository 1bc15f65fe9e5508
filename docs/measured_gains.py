"""What the records say of each technique, as tables for the pages that `generate.py` writes."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vivace import words
from vivace.ledger import Ratio

ROOT = Path(__file__).resolve().parents[1]
INTRO = (
    "Measured: speed against strict fp32 with its 95 % interval, of a step where nothing else is said; 1.00 "
    "is no gain. *Added to a plan* is the same plan without it and with it, each against strict fp32."
)
NOTHING = "Not measured: no record holds a ratio of it."
Plan = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Measured:
    """A plan's ratio, among those of `group`, which were measured by the same search."""

    record: str
    job: str
    group: int
    plan: Plan
    ratio: Ratio
    confirms: bool


def table(name: str) -> str:
    """What was measured of a technique, a row for each job of a record; or that nothing was."""
    rows = list(dict.fromkeys(row for path in records() for row in _rows(name, path)))
    if not rows:
        return f"{NOTHING}\n"
    head = "| job | alone | added to a plan | machine, date | record |\n|---|---|---|---|---|\n"
    return f"{INTRO}\n\n{head}" + "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


@functools.cache
def records() -> tuple[Path, ...]:
    """All records, the newest first."""
    return tuple(
        sorted((ROOT / "records").glob("*/*/*.json"), key=lambda path: (path.stem, path), reverse=True)
    )


@functools.cache
def _read(path: Path) -> tuple[dict[str, Any], tuple[Measured, ...]]:
    record = json.loads(path.read_text(encoding="utf-8"))
    return record, tuple(_found(record, str(record["job"]), f"{path.relative_to(ROOT)}", 0))


def _found(thing: Any, job: str, record: str, group: int) -> Iterator[Measured]:
    """All plans with a ratio, wherever in a record they stand."""
    if isinstance(thing, list):
        for each in thing:
            yield from _found(each, job, record, id(thing))
    if not isinstance(thing, dict):
        return
    plan = thing.get("techniques", thing.get("plan"))
    if isinstance(plan, dict) and (ratio := _ratio(thing.get("ratio"))) is not None:
        yield Measured(record, job, group, plan, ratio, thing.get("role") == "confirmation")
    for key, value in thing.items():
        if key in ("jobs", "recipes") and isinstance(value, dict):
            for name, each in value.items():
                yield from _found(each, name, record, group)
        elif key != "outcomes":  # of scripts, which `_whole_runs` reads
            yield from _found(value, job, record, group)


def _ratio(value: Any) -> Ratio | None:
    if isinstance(value, dict) and value.keys() == {"estimate", "low", "high"}:
        return Ratio(**value) if None not in value.values() else None
    return Ratio(*value) if isinstance(value, list) and len(value) == 3 else None


def _rows(name: str, path: Path) -> Iterator[tuple[str, ...]]:
    record, found = _read(path)
    machine = record["machine"]
    place = f"{machine.get('device', 'no machine of ours')}, {record['date']}", f"`{path.relative_to(ROOT)}`"
    for job in dict.fromkeys(one.job for one in found):
        of_job = [one for one in found if one.job == job]
        alone = [one for one in of_job if list(one.plan) == [name]]
        pair = _added(name, of_job)
        if alone or pair:
            beside = " \N{RIGHTWARDS ARROW} ".join(words.ratio(one.ratio) for one in pair)
            yield f"`{job}`", words.ratio(alone[-1].ratio) if alone else "", beside, *place
    for job, told in (*_of_own(name, record), *_whole_runs(name, record), *_of_memory(name, record)):
        yield job, told, "", *place


def _added(name: str, found: list[Measured]) -> tuple[Measured, ...]:
    """The fastest plan with a technique of which the same search timed the rest, and that; or nothing."""
    timed = [one for one in found if not one.confirms]
    pairs = [
        (other, one)
        for one in timed
        if name in one.plan and len(one.plan) > 1
        for other in timed
        if other.group == one.group and other.plan == {k: v for k, v in one.plan.items() if k != name}
    ]
    return max(pairs, key=lambda pair: pair[1].ratio.counts, default=())


def _of_own(name: str, record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Ratios of a benchmark that is of the technique alone."""
    if record["job"] != name:
        return
    for key, cases in record.items():
        for case, value in cases.items() if isinstance(cases, dict) and key != "machine" else ():
            ratio = _ratio(value.get("ratio", value)) if isinstance(value, dict) else None
            if ratio is not None:
                yield f"{case} (`{record['command']}`)", words.ratio(ratio)


def _whole_runs(name: str, record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Scripts under `vivace run`, where nothing else acted in any of their runs."""
    plans = [list(outcome.get("plan") or ()) for outcome in record.get("outcomes") or []]
    ratio = _ratio(record.get("ratio"))
    if plans and ratio is not None and all(plan == [name] for plan in plans):
        yield f"`{record['job']}`", f"{words.ratio(ratio)}, whole runs under `vivace run`"


def _of_memory(name: str, record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What a smaller peak of memory cost, where nothing else acted."""
    for row in record.get("rows") or [] if "kept_bytes" in record else []:
        slower = row.get("slowdown_percent")
        if slower is not None and list(row["plan"]) == [name]:
            share = f"{row['percent_measured']:.0f} % of the memory"
            yield f"`{record['job']}`", f"{share}, steps {_longer(slower)}"


def _longer(percent: dict[str, float]) -> str:
    sign = -1.0 if percent["estimate"] < 0 else 1.0
    low, high = sorted(sign * percent[end] for end in ("low", "high"))
    how = "shorter" if sign < 0 else "longer"
    return f"{sign * percent['estimate']:.1f} % {how} ({low:.1f} to {high:.1f})"
