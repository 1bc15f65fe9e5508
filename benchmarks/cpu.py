"""How fast `vivace tune` makes eight common jobs on this machine, against strict fp32; writes dated records.

    scripts/bench cpu [JOB ...] [--budget SECONDS | --limits]

Each job is tuned, verified and confirmed in fresh processes; the figures are the confirmation's. Beside each
stands the figure that the lower end of its 95 % interval must reach on 2 cores with avx512-bf16 (AMX helps).
Then the plan's step is profiled: how far it is from what this machine reaches, and where its time goes. Where
the machine is too busy for its ceilings that is not known; --limits adds it to the newest records later.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import _record

import vivace
from vivace.inspection import measuring

WIDEST = 1.3  # upper over lower end of an interval: beyond it the machine was too unsteady to be recorded
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
    parser.add_argument("--limits", action="store_true", help="profile the plans on record, and no more")
    chosen = parser.parse_args()
    for name in _record.named_jobs(parser, chosen.jobs, DEMANDED):
        if chosen.limits:
            print(f"{name:20} {add_limit(name)}", flush=True)
            continue
        record = measure(name, chosen.budget)
        estimate, low, high = record["speedup"].values()
        plan = " + ".join(record["plan"]) or "reference"
        print(
            f"{name:20} {estimate:.2f} ({low:.2f}-{high:.2f})  demanded {DEMANDED[name]}  {plan}", flush=True
        )


def measure(name: str, budget: str) -> dict:
    """Tune one job, and write its record where its interval says something; returns it."""
    with tempfile.TemporaryDirectory() as folder:
        result = _record.tuned(f"{HERE / 'jobs.py'}:{name}", budget, Path(folder) / "tune")
        limit = limit_of(name, result.plan, Path(folder) / "profile")
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
        "limit": limit,
    }
    if record["speedup"]["high"] <= WIDEST * record["speedup"]["low"]:
        _record.write(record)
    else:
        print(f"{name}: too unsteady to be recorded; the same command measures it again", flush=True)
    return record


def add_limit(name: str) -> str:
    """Profile the step of the plan that this machine's newest record of a job holds; what came of it."""
    here = _record.RECORDS / name / vivace.inspect().fingerprint
    newest = max(here.glob("*.json"), default=None)
    if newest is None:
        return f"not known: this machine has no record; scripts/bench cpu {name} makes one"
    record = json.loads(newest.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        limit = limit_of(name, vivace.Plan.from_dict(record["plan"]), Path(folder) / "profile")
    if not limit["share"]:
        return f"not known: {limit['missing']}"
    _record.write({**record, "limit": {"date": _record.today(), **limit}})
    return f"{limit['share']:.0%} of the limit"


def limit_of(name: str, plan: vivace.Plan, folder: Path) -> dict:
    """The share of this machine's limit that a plan's step reaches, and the seconds of each kind of operator
    beside the least that they can take here; or why that is not known.
    """
    machine = vivace.inspect()
    if not measuring.stored(machine):
        absent = measuring.measure(machine)[machine.device.kind].absent
        if measuring.STEADY in absent:
            return {"share": None, "missing": [absent[measuring.STEADY]]}
    document = vivace.profile(f"{HERE / 'jobs.py'}:{name}", plan, out=folder).document
    known = {key: document[key] for key in ("step_seconds", "bound_seconds", "shares", "missing")}
    rows = [
        {key: row[key] for key in ("operator", "seconds")} | {"bound_seconds": row["least_seconds"]}
        for row in document["roofline"]
        if row["seconds"]
    ]
    return {"share": document["share_of_limit"], **known, "operators": rows}


if __name__ == "__main__":
    main()
