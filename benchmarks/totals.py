"""How long whole trainings take with the plan that `vivace tune` found, against without: from the command to
its end, as a person types it.

    scripts/bench totals [JOB ...] [--times N] [--budget TIME] [--rounds N] [--work DIR]

Each job is tuned once. Then `vivace train` runs it whole without a plan and with it, in turn, a process each,
the first of a round being the other one each time; and once with the plan where nothing is compiled yet. The
record holds every row, what `tune` had predicted of the whole training, and how far that was off. Demanded:
within 5 %, and no plan makes the whole longer. `foreign_share` is what other processes used of the processor;
a row during which they used more than 5 % is run again, at most twice. Of trainings the least disturbed one
counts, of searches the last one, whose plan is trained.

All eight jobs are shortened to 20 to 30 s in strict fp32 on two cores: about 30 minutes in all. With `--times
20` a training takes up to ten minutes, and all of them a night.

Rows lie in DIR/rows.jsonl and are not run again: a run that was interrupted goes on where it stopped. The
record is written once there are rows of each job, and anew after each further one.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import _record
import psutil
from cpu import DEMANDED, HERE

import vivace
from vivace.ledger import Ledger
from vivace.measuring.statistics import speed_ratio
from vivace.plan import Plan

# Epochs in which each takes 20 to 30 s in strict fp32 on the two cores of records/; the last three, a few
# seconds, are there to try this file.
EPOCHS = {
    "resnet50_128": 2,
    "resnet18_32": 2,
    "unet": 5,
    "small_cnn": 20,
    "gpt": 1,
    "mobilenet_v3_small": 10,
    "lstm": 2,
    "mlp": 12,
    "search_cnn": 10,
    "search_gpt": 5,
    "search_table": 10,
}
QUIET = 0.05  # what others may use of the processor during a row
AGAIN = 2  # times at most that a row is run again
Row = dict[str, Any]


def main() -> None:
    """Train the named jobs both ways, or all eight, and record them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=", ".join(EPOCHS))
    parser.add_argument("--times", type=int, default=1, help="train so many times as many epochs")
    parser.add_argument("--budget", default="60", help="of each search")
    parser.add_argument("--rounds", type=int, default=3, help="trainings each way")
    parser.add_argument("--work", type=Path, default=Path("runs/totals"), help="rows, plans and caches")
    chosen = parser.parse_args()
    asked = _record.named_jobs(parser, chosen.jobs, EPOCHS) if chosen.jobs else [*DEMANDED]
    command = f"scripts/bench totals --budget {chosen.budget}"
    opened = _record.opened("totals", command, vivace.inspect()) | {"budget": chosen.budget}

    def keep(bench: Bench) -> None:
        if chosen.jobs or chosen.times > 1 or not all(map(bench.of, asked)):
            return  # else the whole record would give way to a part
        _record.write({**opened, "jobs": {name: summary(bench.of(name)) for name in asked}})

    bench = Bench(chosen.work, chosen.budget, run, chosen.times, keep)
    for name in asked:
        bench.measure(name, chosen.rounds)
        print(f"{name:20} {told(summary(bench.of(name)))}", flush=True)
    keep(bench)


class Bench:
    """The rows of a work folder. `start` runs a command with a folder for what is compiled; it returns the
    document that the command printed, its seconds, and the share of the processor that others used. `times`
    lengthens all trainings; `keep` is called after each row.
    """

    def __init__(
        self,
        work: Path,
        budget: str,
        start: Callable[[list[str], Path], Row],
        times: int = 1,
        keep: Callable[[Bench], object] = lambda bench: None,
    ) -> None:
        self.work, self.budget, self.start = work.absolute(), budget, start
        self.times, self.keep = times, keep
        self.same = {"budget": budget, **_record.where()}
        self.work.mkdir(parents=True, exist_ok=True)
        self.ledger = Ledger(self.work / "rows.jsonl")

    def rows(self) -> list[Row]:
        """All rows that were run, oldest first."""
        return self.ledger.read("row")

    def of(self, name: str) -> list[Row]:
        """The rows of a job, of this length, search, machine and versions."""
        same = {**self.same, "job": name, "epochs": EPOCHS[name] * self.times}
        return [row for row in self.rows() if {part: row.get(part) for part in same} == same]

    def measure(self, name: str, rounds: int) -> None:
        """Run the rows of a job that are missing."""
        epochs = EPOCHS[name] * self.times
        job = f"{HERE / 'jobs.py'}:trained,name={name},epochs={epochs}"
        searched = f"tune-{epochs}-{self.budget}-{self.same['vivace'].split()[-1]}"
        plan, warm = self.work / name / searched / "plan.toml", self.work / name / "compiled"
        search = ["tune", job, "--budget", self.budget, "--out", str(plan.parent)]
        tuned = self._row(name, "tune", 0, search, warm)
        ways = {"strict": [], "plan": ["--plan", str(plan)]}
        if not tuned["document"]["plan"]:
            ways.pop("plan")
        for number in range(rounds if len(ways) == 2 else 1):
            for way in sorted(ways, reverse=bool(number % 2)):
                self._train(name, way, number, [job, *ways[way]], warm)
        if "plan" in ways and any(t.card.compiles for t in Plan.load(plan).techniques):
            self._train(name, "cold", 0, [job, *ways["plan"]], self.work / name / "nothing-compiled")

    def _train(self, name: str, way: str, number: int, arguments: list[str], cache: Path) -> None:
        out = self.work / name / f"{way}-{number}"
        shutil.rmtree(out, ignore_errors=True)  # of a row that was cut off
        if way == "cold":
            shutil.rmtree(cache, ignore_errors=True)
        self._row(name, way, number, ["train", *arguments, "--out", str(out)], cache)
        shutil.rmtree(out, ignore_errors=True)

    def _row(self, name: str, way: str, number: int, arguments: list[str], cache: Path) -> Row:
        """The row as it was run before, or now."""
        key = {**self.same, "job": name, "epochs": EPOCHS[name] * self.times, "way": way, "round": number}
        for row in self.of(name):
            if {part: row[part] for part in key} == key:
                return row
        row = {**key, **self.start(arguments, cache)}
        for _ in range(AGAIN):
            if row["foreign_share"] <= QUIET:
                break
            self.ledger.append("disturbed", row)
            shutil.rmtree(arguments[arguments.index("--out") + 1], ignore_errors=True)
            again = {**key, **self.start(arguments, cache)}
            row = again if way == "tune" else min(row, again, key=lambda each: each["foreign_share"])
        self.ledger.append("row", row)
        self.keep(self)
        return row


def run(arguments: list[str], cache: Path) -> Row:
    """One command of a person, timed from its start to its end."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "vivace", *arguments, "--json", "--quiet"]
    busy, own, begin = _busy(), _children(), time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begin
    document = json.loads(done.stdout or "{}")
    answers = (0, 1) if arguments[0] == "tune" else (0,)  # 1 of a training: steps are missing
    if done.returncode not in answers or "error" in document:
        said = document.get("error", {}).get("message") or done.stderr.strip()
        raise SystemExit(f"totals: {' '.join(arguments)} ended with {done.returncode}: {said}")
    foreign = max(0.0, _busy() - busy - (_children() - own)) / (seconds * (os.cpu_count() or 1))
    kept = ("plan", "speedup", "outcome", "job_steps", "training_seconds", "warmup_seconds", "seconds")
    kept += ("training_parts",)
    kept += ("cold_warmup_seconds", "steps", "stepping_seconds", "metric", "loss")
    return {
        "seconds": seconds,
        "foreign_share": foreign,
        "document": {key: document[key] for key in kept if key in document},
    }


def summary(rows: Iterable[Row]) -> Row:
    """A job's rows in figures: measured totals, their ratio, and what `tune` had predicted.

    `error` is by how much the foretold total with the plan was off, `reference_error` that without it.
    """
    found = list(rows)
    totals = {
        way: [row["seconds"] for row in found if row["way"] == way] for way in ("strict", "plan", "cold")
    }
    search = next(row for row in found if row["way"] == "tune")
    document = search["document"]
    predicted = document.get("training_seconds") or {}
    strict = statistics.median(totals["strict"]) if totals["strict"] else None
    figures: Row = {
        "epochs": search["epochs"],
        "plan": document["plan"],
        "outcome": document.get("outcome"),
        "speedup": document["speedup"],
        "tuning_seconds": search["seconds"],
        "predicted": predicted,
        "parts": document.get("training_parts") or {},
        "totals": totals,
        "foreign_share": max(row["foreign_share"] for row in found),
    }
    if strict is not None and "reference" in predicted:
        figures["reference_error"] = predicted["reference"] / strict - 1
    if not totals["plan"] or strict is None:
        return figures
    pairs = list(zip(totals["strict"], totals["plan"], strict=False))
    measured = statistics.median(totals["plan"])
    figures["ratio"] = vars(speed_ratio(pairs)) if len(pairs) >= 3 else None
    figures["saved_seconds"] = strict - measured
    if "plan" in predicted:
        figures["error"] = predicted["plan"] / measured - 1
    return figures


def told(figures: Row) -> str:
    """A job's summary in a line."""
    strict = statistics.median(figures["totals"]["strict"])
    foretold = figures["predicted"]
    before = ""
    if "reference_error" in figures:
        before = f" (predicted {foretold['reference']:.1f} s, {figures['reference_error']:+.1%})"
    if "saved_seconds" not in figures:
        return f"{strict:.1f} s{before}; no plan"
    parts = [f"{strict:.1f} s{before} -> {strict - figures['saved_seconds']:.1f} s"]
    if "error" in figures:
        parts.append(f"predicted {foretold['plan']:.1f} s, {figures['error']:+.1%}")
    if figures["totals"]["cold"]:
        parts.append(f"cold {figures['totals']['cold'][0]:.1f} s")
    parts.append(" + ".join(figures["plan"]))
    return "; ".join(parts)


def _busy() -> float:
    """Seconds that all cores were busy since the machine started."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice


def _children() -> float:
    """Processor seconds of all commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
