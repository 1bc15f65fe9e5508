"""The record of what benchmarks/gpu.sh measured, from the folder that it filled.

    python benchmarks/gpu/record.py DIR     # writes records/gpu/<machine>/<date>.json

Every figure and verdict of cases.jsonl, and of what failed the last status with its reason; then
`scripts/bench table` shows it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from book import FILE, read

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import _record

VERSIONS = ("python", "torch", "torchvision", "triton", "numpy", "torchao", "driver")
SAID_ELSEWHERE = ("date", "device", "kind", "features", "fingerprint", "cores", "vivace", "dry")


def main() -> int:
    """Write the record; exit code 2 where the folder holds no results of a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="what gpu.sh got as --out")
    folder = parser.parse_args().folder
    facts, parts = read(folder)
    if not facts or not parts:
        parser.error(f"'{folder}' holds no {FILE} with results: name the folder that gpu.sh got as --out")
    if facts["dry"]:
        parser.error(f"'{folder}' is of a dry run, whose figures mean nothing: run gpu.sh on a GPU")
    record = made(facts, parts)
    path = _record.path_of(record)
    before = json.loads(path.read_text(encoding="utf-8"))["parts"] if path.exists() else {}
    have = {(part, name) for part, cases in parts.items() for name in cases}
    lost = sorted({(part, name) for part, cases in before.items() for name in cases} - have)
    if lost:
        parser.error(
            f"'{path}' holds {len(lost)} cases that '{folder}' has not, such as '{lost[0][1]}' of "
            f"{lost[0][0]}: add them to it, or put the record away"
        )
    _record.write(record)
    print(_record.path_of(record).relative_to(_record.RECORDS.parent))
    return 0


def made(facts: dict[str, Any], parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The record of these facts and cases."""
    return {
        "benchmark": "gpu",
        "job": "gpu",
        "date": facts["date"],
        "command": f"benchmarks/gpu.sh {' '.join(parts)}",
        "vivace": facts["vivace"],
        "machine": {key: facts[key] for key in ("fingerprint", "device", "features", "cores")},
        "versions": {name: facts[name] for name in VERSIONS if name in facts},
        "facts": {key: facts[key] for key in facts if key not in (*VERSIONS, *SAID_ELSEWHERE)},
        "parts": parts,
    }


if __name__ == "__main__":
    sys.exit(main())
