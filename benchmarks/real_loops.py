"""What `vivace profile` says of training loops that people use, unmodified.

    scripts/bench real_loops [FOLDER] [--only NAME ...] [--python PYTHON] [--keep FILE] [--record]

FOLDER holds copies of the public repositories that real_loops.toml names: ``examples`` (pytorch/examples) and
``nanoGPT`` (karpathy/nanoGPT). Nothing is fetched: what is not there is not run, and said so; our own loops
in the style of a framework are run without it. PYTHON is an interpreter with what the loops import, such as
Lightning. Each loop runs as it stands, with small settings by its own options, until it ends or is
interrupted as by Ctrl-C. Right is a first verdict that real_loops.toml expects.

--keep holds the rows between runs: what stands there is not run again. Rows of another machine or of other
versions are refused.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

import _loop_data
import _record

import vivace
from vivace.errors import VivaceError

HERE = Path(__file__).resolve().parent
SECONDS = 90
GRACE_SECONDS = 30


@dataclasses.dataclass(frozen=True)
class Row:
    """One loop: what is right, what was said, and how far from the limit it ran."""

    loop: str
    repository: str
    expected: list[str]
    because: str
    said: list[str]
    evidence: str
    step_seconds: float | None
    share_of_limit: float | None
    shares: dict[str, float]
    seconds: float

    @property
    def right(self) -> bool:
        """Is the first verdict one that is expected?"""
        return self.said[0] in self.expected


def main() -> None:
    """Profile the loops that are there, and print two lines each."""
    loops = tomllib.loads((HERE / "real_loops.toml").read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="copies of the public repositories")
    parser.add_argument("--only", nargs="+", choices=list(loops), default=list(loops), metavar="NAME")
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has what they import")
    parser.add_argument("--keep", type=Path, help="read and write the rows here")
    parser.add_argument("--record", action="store_true", help="write the rows of all loops to records/")
    chosen = parser.parse_args()
    if chosen.folder is not None and not chosen.folder.is_dir():
        parser.error(f"there is no folder '{chosen.folder}'")
    rows = [Row(**row) for row in _record.kept(chosen.keep) or ()]
    missing = sorted(
        name
        for name in set(loops) - {row.loop for row in rows}
        if place_of(loops[name], chosen.folder) is None
    )
    if chosen.record and missing:
        parser.error(f"--record writes the rows of all loops, and '{missing[0]}' is not there")
    for name in list(loops) if chosen.record else chosen.only:
        folder = place_of(loops[name], chosen.folder)
        if folder is None:
            print(f"-  {name:20} not there: {loops[name]['repository']}", flush=True)
        elif name not in [row.loop for row in rows]:
            rows.append(try_out(name, loops[name], folder, chosen.python))
            show(rows[-1])
            _record.keep(chosen.keep, [dataclasses.asdict(row) for row in rows])
    print(f"{sum(row.right for row in rows)} of {len(rows)} right")
    if chosen.record:
        record = _record.opened("real_loops", "scripts/bench real_loops FOLDER", vivace.inspect())
        record["machine"]["cores"] = len(os.sched_getaffinity(0))
        _record.write({**record, "rows": [{**dataclasses.asdict(row), "right": row.right} for row in rows]})
        print(f"written: {_record.path_of(record)}")


def place_of(loop: dict[str, Any], given: Path | None) -> Path | None:
    """Where the loop lies: in the folder given, or beside this file; None where it is in neither."""
    places = [root / loop["folder"] for root in (HERE, given) if root is not None]
    return next((place.resolve() for place in places if (place / loop["command"][0]).is_file()), None)


def show(row: Row) -> None:
    """Two lines a loop."""
    mark = "ok" if row.right else "NO"
    limit = f"{row.share_of_limit:.0%} of the limit" if row.share_of_limit else "limit not known"
    print(f"{mark} {row.loop:20} {','.join(row.said):24} expected {','.join(row.expected)}; {limit}")
    print(f"      {row.evidence}", flush=True)


def try_out(name: str, loop: dict[str, Any], folder: Path, python: str) -> Row:
    """Profile one loop in its own folder."""
    begin = time.monotonic()
    if "data" in loop:
        _loop_data.KINDS[loop["data"]](folder)
    document = profile(loop["command"], folder, python)
    first = document["verdicts"][0]
    return Row(
        loop=name,
        repository=loop["repository"],
        expected=loop["expected"],
        because=loop["because"],
        said=[verdict["cause"] for verdict in document["verdicts"]],
        evidence=first["evidence"],
        step_seconds=document.get("step_seconds"),
        share_of_limit=document.get("share_of_limit"),
        shares=document.get("shares", {}),
        seconds=time.monotonic() - begin,
    )


def profile(command: list[str], folder: Path, python: str) -> dict[str, Any]:
    """The document of one run, by the command that people use, interrupted where the loop does not end."""
    with tempfile.TemporaryDirectory() as out:
        stop = ["timeout", "--signal=INT", f"--kill-after={GRACE_SECONDS}", str(SECONDS)]
        try:
            result = vivace.profile(
                command=["env", "-C", str(folder), *stop, python, *command],
                out=out,
                script_output=subprocess.DEVNULL,
            )
        except VivaceError as error:
            return {"verdicts": [{"cause": "failed", "evidence": str(error)}]}
        return result.to_dict()


if __name__ == "__main__":
    main()
