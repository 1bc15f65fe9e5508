"""docs/faults.md: the newest record of `faults` as a page."""

from __future__ import annotations

from typing import Any

from faults import counts, figures

HEAD = """# Faults: what a training survives

Written by `scripts/bench table` from the newest record of `scripts/bench faults`; edit it nowhere. Each
row is shown by the tests that are marked with its number, and by nothing else: *survived* where all of
them that can run there pass, or *refused* where to refuse is what must happen; *partly* where some do not
or something is left to show.
`scripts/bench faults 13` runs the tests of a row; `--kills 600` kills more often.
"""
DATED = """On {device}, {cores} cores, torch {torch}, {date}, Vivace {vivace}: of {num} rows {counts}.
In all {figures}, in {tests} tests that took {minutes:.0f} minutes."""
TABLE = "| # | fault | what must happen | result | figures | tests |\n|---|---|---|---|---|---|"
NONE = "No record yet: run `scripts/bench faults --record`."


def page(records: list[dict[str, Any]]) -> str:
    """The page, from the newest record of any machine."""
    if not records:
        return f"{HEAD}\n{NONE}\n"
    record = max(records, key=lambda record: record["date"])
    rows = record["rows"]
    tests = {name for row in rows for name in row["tests"]}
    dated = DATED.format(
        **{key: record["machine"][key] for key in ("device", "cores")},
        torch=record["versions"]["torch"],
        date=record["date"],
        vivace=record["vivace"],
        num=len(rows),
        counts=counts(rows),
        figures=figures(record["total"]),
        tests=len(tests),
        minutes=record["seconds"] / 60,
    )
    left = [f"- {row['row']}, {row['fault']}: {row['left']}." for row in rows if row["left"]]
    parts = [HEAD, dated, "\n".join([TABLE, *map(_line, rows)])]
    parts += ["## What is not shown\n\n" + "\n".join(left)] if left else []
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _line(row: dict[str, Any]) -> str:
    outcomes = [test["outcome"] for test in row["tests"].values()]
    passed, skipped = (outcomes.count(outcome) for outcome in ("passed", "skipped"))
    cells = (
        str(row["row"]),
        row["fault"],
        row["expected"],
        row["result"],
        figures(row["figures"]),
        f"{passed} of {len(outcomes)}" + (f", {skipped} skipped" if skipped else ""),
    )
    return f"| {' | '.join(cells)} |"
