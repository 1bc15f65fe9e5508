"""What befalls a training, and what comes of it: every row of faults.toml, shown by tests.

    scripts/bench faults [ROW ...] [--kills 60] [--keep FILE] [--record]

A row is shown by the tests that are marked with its number (``@pytest.mark.fault(37)``), and by nothing else:
it is *survived* (or what the row says must come of it) where all that can run pass and nothing is left,
*partly* where some do or something is left, *not* where none does. Their figures are what they recorded
themselves: kills, checkpoints that a kill tore, bad inputs, bytes compared and bytes lost.

--kills is the number of SIGKILLs at random times. --keep holds the outcome of every test between runs: what
stands there is not run again, and outcomes of another machine or of other versions are refused. --record
writes what is known of all rows to records/.
"""

from __future__ import annotations

import argparse
import collections
import sys
import time
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import _record

import vivace

ROOT = Path(__file__).resolve().parent.parent
TOLD = ("kills", "torn_checkpoints", "bad_inputs", "bytes_compared", "bytes_lost")


class Rows:
    """A plugin of pytest: runs the tests of some rows, and keeps the outcome of each as soon as it ends."""

    def __init__(self, wanted: set[int], outcomes: dict[str, dict], keep: Path | None, kills: int) -> None:
        self.wanted, self.outcomes, self.keep, self.kills = wanted, outcomes, keep, kills

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        """Leave the tests of wanted rows whose outcome is not known; forget tests that are gone."""
        for gone in self.outcomes.keys() - {item.nodeid for item in items}:
            del self.outcomes[gone]
        left, others = [], []
        for item in items:
            rows = rows_of(item.iter_markers("fault"))
            known = self.outcomes.get(item.nodeid)
            if known is not None:
                known["rows"] = rows
            (left if known is None and self.wanted & set(rows) else others).append(item)
        config.hook.pytest_deselected(items=others)
        items[:] = left
        self.rows = {item.nodeid: rows_of(item.iter_markers("fault")) for item in left}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Add one phase of a test; after the last one the outcome stands."""
        found = self.outcomes.setdefault(
            report.nodeid, {"rows": self.rows[report.nodeid], "outcome": "passed", "seconds": 0.0}
        )
        found["seconds"] = round(found["seconds"] + report.duration, 2)
        if report.outcome != "passed":
            found["outcome"] = report.outcome
        if report.when == "teardown":
            found["figures"] = dict(report.user_properties)
            _record.keep(self.keep, self.outcomes, kills=self.kills)


def main() -> None:
    """Run the rows' tests, print a line each, and the sums."""
    import pytest  # only here: the table of records is written without it

    rows = read_rows()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("rows", nargs="*", type=int, help=f"1 to {max(rows)}; left out, all")
    parser.add_argument("--kills", type=int, default=60, help="SIGKILLs at random times, in all")
    parser.add_argument("--keep", type=Path, help="read and write the outcomes here")
    parser.add_argument("--record", action="store_true", help="write what is known to records/")
    chosen = parser.parse_args()
    if unknown := sorted(set(chosen.rows) - set(rows)):
        parser.error(f"there is no row {unknown[0]}; there are 1 to {max(rows)}")
    if chosen.rows and chosen.record and chosen.keep is None:
        parser.error("--record writes all rows: give those that are known by --keep, or name none")
    outcomes: dict[str, dict] = _record.kept(chosen.keep, kills=chosen.kills) or {}
    begin = time.monotonic()
    wanted = set(chosen.rows or rows)
    options = ["-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}", f"--kills={chosen.kills}"]
    code = pytest.main(
        [*options, *marked_files()], plugins=[Rows(wanted, outcomes, chosen.keep, chosen.kills)]
    )
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        sys.exit(int(code))
    found = [row_of(number, rows[number], outcomes) for number in sorted(wanted)]
    for row in found:
        print(f"{row['row']:>3} {row['result']:10} {row['fault']}: {figures(row['figures']) or 'no figure'}")
    print(f"{counts(found)}; {figures(total(outcomes.values()))}; {time.monotonic() - begin:.0f} s")
    if chosen.record:
        record = _record.opened("faults", f"scripts/bench faults --kills {chosen.kills}", vivace.inspect())
        all_rows = [row_of(number, row, outcomes) for number, row in rows.items()]
        seconds = round(sum(outcome["seconds"] for outcome in outcomes.values()))
        whole = {"rows": all_rows, "total": total(outcomes.values()), "seconds": seconds}
        _record.write(record | whole)
    sys.exit(0 if all(row["result"] not in ("not", "not shown") for row in found) else 1)


def read_rows() -> dict[int, dict[str, str]]:
    """The rows of faults.toml by number."""
    text = (ROOT / "benchmarks" / "faults.toml").read_text(encoding="utf-8")
    return {int(number): row for number, row in tomllib.loads(text).items()}


def marked_files() -> list[str]:
    """The files of tests in which a row is shown."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path) for path in paths if "mark.fault(" in path.read_text(encoding="utf-8")]


def rows_of(markers: Iterable[Any]) -> list[int]:
    """The numbers in some markers."""
    return sorted({row for marker in markers for row in marker.args})


def row_of(number: int, row: dict[str, str], outcomes: dict[str, dict]) -> dict[str, Any]:
    """A row with what its tests say of it."""
    tests = {name: one for name, one in outcomes.items() if number in one["rows"]}
    return {
        "row": number,
        "fault": row["fault"],
        "expected": row["expected"],
        "result": result(row, [one["outcome"] for one in tests.values()]),
        "left": row.get("left", ""),
        "figures": total(tests.values()),
        "tests": {name: {k: one[k] for k in ("outcome", "seconds")} for name, one in tests.items()},
    }


def result(row: dict[str, str], outcomes: list[str]) -> str:
    """``survived`` or what else the row must come to; ``partly``, ``not``, or ``not shown`` by any test."""
    shown = [outcome for outcome in outcomes if outcome != "skipped"]
    if not shown:
        return "not shown"
    if "passed" not in shown:
        return "not"
    whole = set(shown) == {"passed"} and "left" not in row
    return row.get("answer", "survived") if whole else "partly"


def total(outcomes: Iterable[dict]) -> dict[str, int]:
    """The sums of what tests recorded."""
    found: collections.Counter[str] = collections.Counter()
    for outcome in outcomes:
        found.update({name: value for name, value in outcome.get("figures", {}).items() if name in TOLD})
    return {name: found[name] for name in TOLD if name in found and (found[name] or name == "bytes_lost")}


def figures(sums: dict[str, int]) -> str:
    """``60 kills, 0 bytes lost``."""
    return ", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in sums.items())


def counts(rows: list[dict[str, Any]]) -> str:
    """``38 survived, 4 partly``."""
    found = collections.Counter(row["result"] for row in rows)
    return ", ".join(f"{count} {name}" for name, count in found.most_common())


if __name__ == "__main__":
    main()
