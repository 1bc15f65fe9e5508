"""Is the right plan found while others use the machine? Each job is tuned beside four busy processes.

    scripts/bench busy [JOB ...] [--load N] [--budget TIME] [--work DIR]

First each job is tuned alone, then beside `--load` processes that compute all the time, at the same priority.
Then, alone again, the plan that was found beside them is timed in turn with the one that was found alone, and
with strict fp32, in new processes. Right is a plan whose step is at least 0.95 times as fast as either's.
Demanded: 8 of 10 jobs, with the budget `fast`.

Ten jobs take about an hour: 2 x 2 min of tuning and a minute of timing each. Rows lie in DIR/rows.jsonl, and
those of this machine, these versions, load and budget are not run again; the record is written once all are
there.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _record
from cpu import DEMANDED, HERE

import vivace
from vivace.errors import Unsteady
from vivace.ledger import Ledger
from vivace.measuring.paired import Comparison, Contestant, across, compare
from vivace.plan import Plan
from vivace.processes.launch import Source

JOBS = (*DEMANDED, "search_cnn", "search_gpt")
RIGHT = 0.95  # times as fast as the plan that was found alone
ROUNDS, MOST_ROUNDS, SECONDS = 3, 9, 8.0  # of the timing of a plan
Row = dict[str, Any]


def main() -> None:
    """Tune the named jobs, or all ten, alone and beside others, and record them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=", ".join(JOBS))
    parser.add_argument("--load", type=int, default=4, help="processes that compute all the time")
    parser.add_argument("--budget", default="fast", help="of each search")
    parser.add_argument("--work", type=Path, default=Path("runs/busy"), help="rows and plans")
    chosen = parser.parse_args()
    asked = _record.named_jobs(parser, chosen.jobs, JOBS)
    command = f"scripts/bench busy --load {chosen.load} --budget {chosen.budget}"
    opened = _record.opened("busy", command, vivace.inspect()) | {"load": chosen.load}
    chosen.work.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(chosen.work / "rows.jsonl")
    same = {**_record.where(), "load": chosen.load, "budget": chosen.budget}
    for name in asked:
        if name not in rows_of(ledger, same):
            ledger.append("row", same | row_of(name, chosen.work, chosen.budget, chosen.load))
        rows = {job: row for job, row in rows_of(ledger, same).items() if job in asked}
        print(told(rows[name]), flush=True)
        right = sum(row["right"] for row in rows.values())
        if not chosen.jobs and len(rows) == len(JOBS):  # else the whole record would give way to a part
            _record.write({**opened, "right": right, "of": len(rows), "jobs": rows})


def rows_of(ledger: Ledger, same: Row) -> dict[str, Row]:
    """The rows by job that were measured in the same way."""
    rows = [row for row in ledger.read("row") if {key: row.get(key) for key in same} == same]
    return {row["job"]: row for row in rows}


def row_of(name: str, work: Path, budget: str, load: int) -> Row:
    """Tune a job both ways and time both plans."""
    reference = f"{HERE / 'jobs.py'}:{name}"
    alone = tuned(reference, budget, work / name / "alone")
    with busy(load):
        beside = tuned(reference, budget, work / name / "beside")
    row: Row = {"job": name, "load": load}
    plans = {}
    for way, document in (("alone", alone), ("beside", beside)):
        measured = [trial for trial in document["trials"] if trial["status"] == "measured"]
        plans[way] = Plan.from_dict(document["plan"])
        row[way] = {
            "plan": document["plan"],
            "outcome": document["outcome"],
            "told": document["speedup"],
            "seconds": document["seconds"],
            "measured": len(measured),
            "foreign_share": max((trial["foreign_share"] for trial in measured), default=0.0),
        }
    others = {"alone": plans["alone"], "strict": Plan()}
    over = {way: speed(reference, plans["beside"], other) for way, other in others.items()}
    return row | {"over": over, "right": all(ratio["estimate"] >= RIGHT for ratio in over.values())}


def tuned(reference: str, budget: str, out: Path) -> dict[str, Any]:
    """What the command says, as a person gives it; what was ended half way begins anew."""
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "vivace", "tune", reference, "--budget", budget, "--out", str(out)]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def speed(reference: str, plan: Plan, other: Plan) -> dict[str, float]:
    """How many times as fast as another's a plan's step is, over a few pairs of new processes."""
    if plan == other:
        return {"estimate": 1.0, "low": 1.0, "high": 1.0}
    source, machine = Source(reference), vivace.inspect()
    found: list[Comparison] = []
    for seed in range(MOST_ROUNDS):
        both = [Contestant(source, machine) for _ in range(2)]
        try:
            for contestant, held in zip(both, (other, plan), strict=True):
                contestant.open(held, seed=seed)
            found.append(compare(*both, seconds=SECONDS))
        except Unsteady as error:  # others came: another round
            print(error, flush=True)
        finally:
            for contestant in both:
                contestant.close()
        if len(found) == ROUNDS:
            return dataclasses.asdict(across(found))
    raise SystemExit(
        f"{reference}: the machine is not steady enough to time a plan; the same command goes on"
    )


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Inside, so many processes compute all the time."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_compute, args=(os.getpid(),), daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def _compute(parent: int) -> None:
    """Until the parent is gone."""
    number = 0
    while os.getppid() == parent:
        for _ in range(1_000_000):
            number = (number * 1103515245 + 12345) % 2**31


def told(row: Row) -> str:
    """A row in a line."""
    plans = {way: " + ".join(row[way]["plan"]) or "no plan" for way in ("alone", "beside")}
    times = ", ".join(f"{ratio['estimate']:.2f}x as fast as {way}" for way, ratio in row["over"].items())
    mark = "right" if row["right"] else "WRONG"
    return f"{row['job']:20} {mark:5}  {times}; alone {plans['alone']}; beside {plans['beside']}"


if __name__ == "__main__":
    main()
