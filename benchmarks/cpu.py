"""How fast `vivace tune` makes eight common jobs on this machine, against strict fp32; writes dated records.

    scripts/bench cpu [JOB ...] [--budget SECONDS]

Each job is tuned, verified and confirmed in fresh processes; the figures are the confirmation's. Beside each
stands the figure that the lower end of its 95 % interval must reach on 2 cores with avx512-bf16 (AMX helps).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import _record

import vivace

HERE = Path(__file__).resolve().parent
DEMANDED = {
    "resnet50_128": 1.8,
    "resnet18_32": 1.9,
    "unet": 2.2,
    "small_cnn": 2.0,
    "gpt": 1.6,
    "mobilenet_v3_small": 1.5,
    "lstm": 1.6,
    "mlp": 1.1,
}


def main() -> None:
    """Tune the named jobs, or all of them, and record each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=", ".join(DEMANDED))
    parser.add_argument("--budget", default="300", help="fast, balanced, max or seconds, for each job")
    chosen = parser.parse_args()
    for name in _record.named_jobs(parser, chosen.jobs, DEMANDED):
        record = measure(name, chosen.budget)
        estimate, low, high = record["speedup"].values()
        plan = " + ".join(record["plan"]) or "reference"
        print(
            f"{name:20} {estimate:.2f} ({low:.2f}-{high:.2f})  demanded {DEMANDED[name]}  {plan}", flush=True
        )


def measure(name: str, budget: str) -> dict:
    """Tune one job and write its record; returns it."""
    with tempfile.TemporaryDirectory() as folder:
        result = vivace.tune(f"{HERE / 'jobs.py'}:{name}", budget=budget, out=Path(folder) / "tune")
    if result.interrupted:
        raise SystemExit(result.exit_code)  # what was cut off is no record
    document, verdict = result.to_dict(), result.verdict
    kept = ("reason", "plan", "speedup", "baselines", "promise", "break_even_steps", "waterfall", "seconds")
    trials = ("techniques", "status", "reason", "ratio", "peak_bytes", "warmup_seconds", "predicted", "role")
    command = f"scripts/bench cpu {name} --budget {budget}"
    record = {
        **_record.opened("cpu", command, vivace.inspect(), job=name),
        "demanded": DEMANDED[name],
        **{key: document[key] for key in kept},
        **{key: getattr(verdict, key, None) for key in ("kept", "loss_envelopes", "displacement_envelopes")},
        "trials": [{key: trial[key] for key in trials} for trial in document["trials"]],
    }
    _record.write(record)
    return record


if __name__ == "__main__":
    main()
