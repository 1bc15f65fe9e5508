"""The ruler on a stranger's folder: job files that say whether what they bring is the same model.

Each NAME.py holds a Job called `job`, the training as it should be, and what is judged:

- another Job called `edited`; or
- beside it a plan file NAME.toml, whose techniques NAME.py may register.

Comments at the file's top say what is right: ``# expect: different`` or ``# expect: same``; for an `edited`
job that may round more coarsely than fp32 also ``# precision: bfloat16`` (or tf32, float16). A name that
begins with an underscore is a helper of the others, and is not judged.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import vivace
from vivace.errors import ChildFailed, InputError, Refused
from vivace.ledger import Ledger
from vivace.verifying import Verdict

HEADER = re.compile(r"# (expect|precision): *(\w+) *$")
EXPECTED = {"different": False, "same": True}
ANSWERS = {True: "kept", False: "broken", None: "unjudged"}

Item = dict[str, Any]


def cases(folder: Path) -> Iterator[Item]:
    """What the folder asks, by file. Raises InputError on a file that does not say what is right."""
    files = sorted(path for path in folder.glob("*.py") if not path.name.startswith("_"))
    if not files:
        raise InputError(f"there is no job file in '{folder}'")
    for path in files:
        lines = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
        found = dict(match.groups() for match in map(HEADER.match, lines) if match)
        if found.get("expect") not in EXPECTED:
            raise InputError(f"'{path}' must begin with '# expect: different' or '# expect: same'")
        yield {"name": path.stem, "path": path, "precision": "float32", **found}


def judge(case: Item) -> Item:
    """The case with the ruler's answer: kept, broken, unjudged, refused, or failed with the reason."""
    path, begin = case["path"], time.monotonic()
    try:
        verdict = _verdict(path, case["precision"])
    except Refused as refused:
        answer: Item = {"answer": "refused", "reason": str(refused)}
    except (ChildFailed, InputError) as failed:
        answer = {"answer": "failed", "reason": str(failed)[:200]}
    else:
        answer = {"answer": ANSWERS[verdict.kept], "reason": verdict.reason, "first": verdict.first}
    kept = {key: case[key] for key in ("name", "expect", "precision")}
    return {**kept, **answer, "seconds": round(time.monotonic() - begin, 1)}


def summarise(folder: Path, done: list[Item]) -> Item:
    """How many were caught and how many correct ones were not kept, and which. A crash is a miss."""
    acted = [d for d in done if d["answer"] not in ("refused", "unjudged")]
    different = [d for d in acted if d["expect"] == "different"]
    same = [d for d in acted if d["expect"] == "same"]
    missed = [d["name"] for d in different if d["answer"] != "broken"]
    alarms = [f"{d['name']}: {d['reason']}" for d in same if d["answer"] != "kept"]
    return {
        "folder": folder.resolve().name,
        "caught": {"count": len(different) - len(missed), "of": len(different)},
        "false_alarms": {"count": len(alarms), "of": len(same)},
        "missed": missed,
        "alarms": alarms,
        "open": [f"{d['name']}: {d['reason']}" for d in done if d not in acted],
    }


def examine(folder: Path, ledger: Ledger, deadline: float, *, fresh: bool) -> Item | None:
    """Judge the folder's cases that the ledger does not hold yet; its summary, None where time was up."""
    wanted = list(cases(folder))
    if fresh:
        ledger.path.unlink(missing_ok=True)
    known = {entry["name"]: entry for entry in ledger.read("judgement")}
    for number, case in enumerate(wanted, 1):
        if case["name"] in known:
            continue
        if time.monotonic() > deadline:
            return None
        known[case["name"]] = outcome = judge(case)
        ledger.append("judgement", outcome)
        print(
            f"{number:4}/{len(wanted)} {case['expect']:>9}: {outcome['answer']:8} {case['name']}", flush=True
        )
    return summarise(folder, [known[case["name"]] for case in wanted])


def show(record: Item) -> None:
    """Print the rates, and whose cases they are of."""
    caught, alarms = record["caught"], record["false_alarms"]
    print(f"\non the cases of '{record['folder']}':")
    print(f"caught {caught['count']} of {caught['of']}, false alarms {alarms['count']} of {alarms['of']}")
    for title in ("missed", "alarms", "open"):
        for line in record[title]:
            print(f"  {title}: {line}")


def _verdict(path: Path, precision: str) -> Verdict:
    plan = path.with_suffix(".toml")
    if plan.exists():
        return vivace.verify(f"{path}:job", plan)
    return vivace.verify(f"{path}:edited", against=f"{path}:job", precision=precision)
