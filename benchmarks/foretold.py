"""Predictions that need no GPU, against what a GPU measured: speed by `advise`, memory by `memory.predict`.

    scripts/bench foretold

For each record in records/gpu: the steps of ResNet-50 under plans that advice can describe, which are TF32,
bfloat16 and memory order. Writes records/foretold/<machine>/<date>.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _record

import vivace
from vivace.memory.predict import predict
from vivace.plan import Plan

WORKLOADS = Path(__file__).resolve().parent / "gpu"
DESCRIBED = {"tf32", "bf16_autocast", "channels_last", "cudnn_benchmark"}


def main() -> None:
    """Predict what each record of a GPU measured, print both, and record them."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    newest = {path.parent: path for path in sorted((_record.RECORDS / "gpu").glob("*/*.json"))}
    for path in newest.values():
        measured = json.loads(path.read_text(encoding="utf-8"))
        rows = list(compared(measured))
        for row in rows:
            print(json.dumps(row))
        record = _record.opened("foretold", "scripts/bench foretold", vivace.inspect())
        record |= {"machine": measured["machine"], "of": measured["date"]}
        record["versions"]["driver"] = measured["versions"].get("driver", "")
        if rows:
            _record.write({**record, "rows": rows})


def compared(measured: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What was foretold and found of each plan that advice can describe."""
    sys.path.insert(0, str(WORKLOADS))
    import workloads

    job, device = workloads.resnet50_256, measured["machine"]["device"]
    for name, case in measured["parts"].get("cnn", {}).items():
        plan = Plan.from_dict(case.get("plan", {}))
        if not name.startswith("resnet50_256 | ") or "peak_bytes" not in case or set(plan.names) - DESCRIBED:
            continue
        half = "amp_bf16" if "bf16_autocast" in plan.names else "fp32"
        advice = vivace.advise(
            f"{WORKLOADS / 'workloads.py'}:resnet50_256",
            gpus=[device],
            steps=1,
            precision="tf32" if "tf32" in plan.names else half,
            channels_last="channels_last" in plan.names,
        )
        (found,) = (offer.prediction for offer in advice.offers if offer.prediction.num_gpus == 1)
        speeds = (found.batch_size / seconds for seconds in (found.seconds, found.high, found.low))
        yield {
            "plan": plan.to_dict(),
            "samples_per_second": case["samples_per_second"],
            "foretold_samples_per_second": dict(zip(("estimate", "low", "high"), speeds, strict=True)),
            "peak_bytes": case["peak_bytes"],
            "foretold_peak_bytes": predict(job, plan, device="cuda").peak_bytes,
        }


if __name__ == "__main__":
    main()
