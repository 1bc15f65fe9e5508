"""How far the predicted peak of a training step is from the measured one; writes a dated record.

    scripts/bench memory [JOB ...]

Each job under four plans. Predicted from fake tensors, without running; measured as the bytes that the step's
tensors occupy at most, by torch's profiler (on a GPU: by the allocator). The median error shall be 3 % at
most, the largest 8 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import _record
import jobs

import vivace
from vivace.errors import Refused
from vivace.memory.predict import predict
from vivace.observing.observe import observe
from vivace.session.opening import first_batches, start
from vivace.tensors.trees import batch_size, split

PLANS: dict[str, dict[str, dict[str, Any]]] = {
    "reference": {},
    "recomputed": {"checkpoint": {}},
    "bf16": {"bf16_autocast": {}},
    "pieces": {"micro_batches": {"num": 4}},
}
JOBS = (
    "mlp",
    "search_table",
    "search_gpt",
    "search_cnn",
    "small_cnn",
    "lstm",
    "gpt",
    "unet",
    "mobilenet_v3_small",
    "resnet18_32",
    "resnet50_128",
)
SAMPLES = {"resnet50_128": 8}  # where a whole batch takes minutes on two cores
MEDIAN_PERCENT, WORST_PERCENT = 3.0, 8.0


def main() -> None:
    """Predict and measure the named jobs, or all of them, and record the errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=", ".join(JOBS))
    chosen = parser.parse_args()
    names = _record.named_jobs(parser, chosen.jobs, JOBS)
    rows = [row for name in names for row in rows_of(name, getattr(jobs, name))]
    errors = sorted(abs(row["error_percent"]) for row in rows if "error_percent" in row)
    summary = {"pairs": len(errors), "median_percent": statistics.median(errors), "worst_percent": errors[-1]}
    print(json.dumps(summary))
    if not chosen.jobs:
        write(rows, summary)


def rows_of(name: str, job: vivace.Job) -> list[dict[str, Any]]:
    """One row for each plan: predicted and measured bytes, their parts, and the error; or the refusal."""
    batches = [
        split(batch, SAMPLES.get(name, batch_size(batch)))[0] for batch in first_batches(job.data(), 2)
    ]
    rows = []
    for title, content in PLANS.items():
        plan = vivace.Plan.from_dict(content)
        row: dict[str, Any] = {"job": name, "plan": title, "samples": batch_size(batches[0])}
        try:
            with start(job, plan, vivace.inspect()) as session:
                row["measured_bytes"] = observe(session, batches).peak_bytes
                device = session.build.device.type
            found = predict(job, plan, batch=batches[-1], device=device)
        except Refused as refused:
            rows.append({**row, "refused": str(refused)})
            print(f"{name:20} {title:12} {refused}", flush=True)
            continue
        row |= {"predicted_bytes": found.peak_bytes, "parts": found.parts}
        row |= {"reserved_bytes": found.reserved_bytes}
        row["error_percent"] = round(100 * (found.peak_bytes / row["measured_bytes"] - 1), 2)
        rows.append(row)
        sizes = [f"{row[key] / 2**20:9.2f}" for key in ("predicted_bytes", "measured_bytes")]
        print(f"{name:20} {title:12} {' '.join(sizes)} MiB {row['error_percent']:+6.2f} %", flush=True)
    return rows


def write(rows: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    """The dated record of this machine."""
    record = _record.opened("memory", "scripts/bench memory", vivace.inspect())
    demanded = {"median_percent": MEDIAN_PERCENT, "worst_percent": WORST_PERCENT}
    _record.write({**record, "demanded": demanded, **summary, "rows": rows})


if __name__ == "__main__":
    main()
