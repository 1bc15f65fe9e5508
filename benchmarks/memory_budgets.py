"""What less activation memory costs: the planner's choice at 75, 50 and 33 % of the reference's activations.

    python benchmarks/memory_budgets.py [JOB ...]

Only decisions that change no bit are allowed. The step is timed in alternation with the reference's, in one
process. The slowdowns asked for are 5, 15 and 30 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import _record
import jobs

import vivace
from vivace.engine.opening import first_batches, start
from vivace.errors import AnswerIsNo
from vivace.memory.choosing import choose
from vivace.memory.predict import predict
from vivace.surgery import batch_size, split

JOBS = {"gpt": 0, "unet": 8, "resnet50_128": 8}  # samples a step; 0: the job's own batch
DEMANDED = {75: 5.0, 50: 15.0, 33: 30.0}  # per cent of the activations: per cent of slowdown
ROUNDS = 5


def main() -> None:
    """Choose and time for the named jobs, or all of them, and record it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=", ".join(JOBS))
    chosen = parser.parse_args()
    names = _record.named_jobs(parser, chosen.jobs, JOBS)
    rows = [row for name in names for row in rows_of(name, getattr(jobs, name))]
    if not chosen.jobs:
        write(rows)


def rows_of(name: str, job: vivace.Job) -> list[dict[str, Any]]:
    """One row for each share of the activations."""
    size = JOBS[name]
    batches = [split(batch, size or batch_size(batch))[0] for batch in first_batches(job.data(), 2)]
    smaller = vivace.Job(**{**vars(job), "data": lambda: batches})
    activations = predict(smaller, batch=batches[0]).parts["activations"]
    kept = choose(smaller, vivace.inspect(), 2**60).peak_bytes
    rows = []
    for percent, demanded in DEMANDED.items():
        row: dict[str, Any] = {"job": name, "samples": batch_size(batches[0]), "percent": percent}
        row |= {"kept_bytes": kept, "activation_bytes": activations, "demanded_slowdown_percent": demanded}
        try:
            found = choose(smaller, vivace.inspect(), kept - activations * (100 - percent) // 100)
        except AnswerIsNo as no:
            row["reason"] = str(no)
        else:
            row |= {"peak_bytes": found.peak_bytes, "plan": found.plan.to_dict()}
            row["slowdown_percent"] = round(100 * (slowdown(smaller, found.plan, batches) - 1), 1)
        rows.append(row)
        print(row.get("slowdown_percent", row.get("reason")), json.dumps(row), flush=True)
    return rows


def slowdown(job: vivace.Job, plan: vivace.Plan, batches: list[Any]) -> float:
    """Seconds of a step under `plan` over those of the reference, in alternation; the median ratio."""
    machine = vivace.inspect()
    with start(job, vivace.Plan(), machine) as reference, start(job, plan, machine) as session:
        ratios = []
        for _ in range(ROUNDS + 1):
            seconds = []
            for one in (reference, session):
                begin = time.perf_counter()
                one.step(batches[0])
                seconds.append(time.perf_counter() - begin)
            ratios.append(seconds[1] / seconds[0])
    return statistics.median(ratios[1:])


def write(rows: list[dict[str, Any]]) -> None:
    """The dated record of this machine."""
    record = _record.opened("memory_budgets", "python benchmarks/memory_budgets.py", vivace.inspect())
    _record.write({**record, "rows": rows})


if __name__ == "__main__":
    main()
