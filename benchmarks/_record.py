"""What all benchmarks share: the jobs that were asked for, dated records of this machine, and what is kept
between two runs.

A record lies in records/<job>/<machine>/<date>.json and says under which machine and versions it holds.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import hashlib
import json
import math
import re
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import vivace
from vivace.files import replace_text
from vivace.machine import Machine
from vivace.tuning.result import Result

RECORDS = Path(__file__).resolve().parent.parent / "records"
FOLDERS = re.compile(r"(?<![\w./:-])/(?:[\w.+-]+/)+")


def named_jobs(parser: argparse.ArgumentParser, asked: Collection[str], known: Collection[str]) -> list[str]:
    """The jobs asked for, or all of them; leaves with exit code 2 where one is not known."""
    unknown = sorted(set(asked) - set(known))
    if unknown:
        parser.error(f"there is no job '{unknown[0]}'; there are: {', '.join(known)}")
    return list(asked or known)


def today() -> str:
    """The date in UTC, under which records are filed."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def opened(benchmark: str, command: str, machine: Machine, job: str | None = None) -> dict[str, Any]:
    """A record that says what was measured where, and holds no figure yet."""
    return {
        "benchmark": benchmark,
        "job": job or benchmark,
        "date": today(),
        "command": command,
        "vivace": vivace.__version__,
        "machine": {
            "fingerprint": machine.fingerprint,
            "device": machine.device.name,
            "features": machine.device.features,
            "cores": machine.num_cores,
        },
        "versions": dict(machine.versions),
    }


def path_of(record: Mapping[str, Any]) -> Path:
    """Where a record lies."""
    return RECORDS / record["job"] / record["machine"]["fingerprint"] / f"{record['date']}.json"


def write(record: Mapping[str, Any]) -> None:
    """Write a record where it belongs, whole or not at all."""
    path = path_of(record)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(clean(record), indent=1, allow_nan=False) + "\n")


@functools.cache
def where() -> dict[str, str]:
    """Under which machine and which Vivace this process measures, down to its last line."""
    digest = hashlib.sha256()
    package = Path(vivace.__file__).parent
    for path in sorted([*package.rglob("*.py"), *package.rglob("*.c")]):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    machine = vivace.inspect()
    return {
        "machine": machine.fingerprint,
        "versions": json.dumps(machine.versions, sort_keys=True),
        "vivace": f"{vivace.__version__} {digest.hexdigest()[:12]}",
    }


def tuned(job: vivace.Job | str, budget: str | float, out: str | Path) -> Result:
    """What `vivace tune` finds. Ctrl-C ends the benchmark, too: what was cut off is no search."""
    result = vivace.tune(job, budget=budget, out=out)
    if result.interrupted:
        raise SystemExit(result.exit_code)
    return result


def keep(path: Path | None, thing: Any, **options: Any) -> None:
    """Write what was measured so far with these `options`, whole or not at all; without a path nothing."""
    if path is not None:
        replace_text(path, json.dumps({"where": where() | options, "kept": thing}, indent=1) + "\n")


def kept(path: Path | None, **options: Any) -> Any:
    """What `keep` wrote before; None where there is nothing. Ends the process where that was measured on
    another machine, under other versions or with other options.
    """
    if path is None or not path.is_file():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or found.get("where") != where() | options:
        sys.exit(
            f"'{path}' was measured on another machine, under other versions or with other options: name "
            "another file"
        )
    return found["kept"]


def of_today(record: Mapping[str, Any], same: Collection[str]) -> dict[str, Any] | None:
    """The record of this kind, machine and day; None where there is none. Ends the process where it does not
    agree in these keys: going on would mix both, or overwrite it.
    """
    path = path_of(record)
    if not path.is_file():
        return None
    before: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for key in same:
        old, new = before.get(key), clean(record[key])
        if old != new:
            known = old if isinstance(old, dict) and isinstance(new, dict) else {}
            other = next((name for name in new if known.get(name) != new[name]), key) if known else key
            sys.exit(f"today's record is of another {other}: put '{path}' away, or go on with that")
    return before


def newest_like(record: Mapping[str, Any], same: Collection[str]) -> dict[str, Any] | None:
    """The newest record of the same kind and machine that agrees in these keys; None where there is none."""
    for path in sorted(path_of(record).parent.glob("*.json"), reverse=True):
        before: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if all(before.get(key) == clean(record[key]) for key in same):
            return before
    return None


def clean(thing: Any) -> Any:
    """A record says nothing of folders and holds no infinity."""
    if isinstance(thing, Mapping):
        return {key: clean(value) for key, value in thing.items()}
    if isinstance(thing, (list, tuple)):
        return [clean(value) for value in thing]
    if isinstance(thing, str):
        return FOLDERS.sub("", thing)
    return None if isinstance(thing, float) and not math.isfinite(thing) else thing
