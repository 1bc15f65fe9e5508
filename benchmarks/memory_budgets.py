"""What less activation memory costs: the planner's choice at 75, 50 and 33 % of the reference's activations.

    python benchmarks/memory_budgets.py [JOB ...]

Only decisions that change no bit are allowed. The step is timed in alternation with the reference's, in one
process. The slowdowns asked for are 5, 15 and 30 %.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import statistics
import time
from pathlib import Path
from typing import Any

import vivace
from vivace.engine.opening import first_batches, start
from vivace.errors import AnswerIsNo
from vivace.memory.choosing import choose
from vivace.memory.predict import predict
from vivace.surgery import batch_size, split

HERE = Path(__file__).resolve().parent
RECORDS = HERE.parent / "records" / "memory_budgets"
JOBS = {"gpt": 0, "unet": 8, "resnet50_128": 8}  # samples a step; 0: the job's own batch
DEMANDED = {75: 5.0, 50: 15.0, 33: 30.0}  # per cent of the activations: per cent of slowdown
ROUNDS = 5


def main() -> None:
    """Choose and time for the named jobs, or all of them, and record it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=", ".join(JOBS))
    chosen = parser.parse_args()
    unknown = sorted(set(chosen.jobs) - set(JOBS))
    if unknown:
        parser.error(f"there is no job '{unknown[0]}'; there are: {', '.join(JOBS)}")
    spec = importlib.util.spec_from_file_location("jobs", HERE / "jobs.py")
    assert spec is not None
    assert spec.loader is not None
    jobs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(jobs)
    rows = [row for name in chosen.jobs or JOBS for row in rows_of(name, getattr(jobs, name))]
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
    machine = vivace.inspect()
    record = {
        "benchmark": "memory_budgets",
        "job": "memory_budgets",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": "python benchmarks/memory_budgets.py",
        "vivace": vivace.__version__,
        "machine": {
            "fingerprint": machine.fingerprint,
            "device": machine.device.name,
            "features": machine.device.features,
            "cores": machine.num_cores,
        },
        "versions": machine.versions,
        "rows": rows,
    }
    path = RECORDS / machine.fingerprint / f"{record['date']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
