"""What a profile costs a script: wall and processor seconds of the same training, with and without.

    scripts/bench profile_cost [--steps 2000] [--pairs 4] [--record]

The script trains a fixed number of steps of a small network; runs alternate. Demanded: at most 3 % of a
script that trains for a minute: what the watched, traced and counted steps cost, they cost once.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import _record

import vivace

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "planted" / "healthy_cnn.py"
INJECT = HERE.parent / "src" / "vivace" / "profile" / "inject"
DEMANDED = 1.03


def main() -> None:
    """Alternate both, print the ratios, and leave with 1 where the median is more than demanded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--record", action="store_true", help="write the result to records/")
    chosen = parser.parse_args()
    pairs = []
    walls, processors = [], []
    for number in range(chosen.pairs):
        order = (
            (False, True) if number % 2 == 0 else (True, False)
        )  # a machine that slows down favours neither
        found = {profiled: run(chosen.steps, profiled) for profiled in order}
        alone, profiled = found[False], found[True]
        walls.append(profiled[0] / alone[0])
        processors.append(profiled[1] / alone[1])
        pairs.append({"alone": alone, "profiled": profiled})
        print(f"alone {alone[0]:.1f} s, profiled {profiled[0]:.1f} s: {walls[-1]:.3f}", flush=True)
    print(f"wall {statistics.median(walls):.3f}, processor time {statistics.median(processors):.3f}")
    if chosen.record:
        write_record(chosen.steps, pairs, statistics.median(walls), statistics.median(processors))
    if statistics.median(processors) > DEMANDED:
        raise SystemExit(f"more than the {DEMANDED:.2f} that are demanded")


def write_record(steps: int, pairs: list[dict], wall: float, processor: float) -> None:
    """Write records/profile_cost/<machine>/<date>.json."""
    found = {"demanded": DEMANDED, "steps": steps, "wall_ratio": wall, "processor_ratio": processor}
    record = _record.opened("profile_cost", "scripts/bench profile_cost", vivace.inspect())
    _record.write({**record, **found, "wall_and_processor_seconds": pairs})


def run(steps: int, profiled: bool) -> tuple[float, float]:
    """Wall and processor seconds of one run."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PLANTED_STEPS": str(steps)}
        if profiled:
            before = os.environ.get("PYTHONPATH")
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(INJECT), before]))
            environment["VIVACE_PROFILE"] = folder
        used, begin = _processor_seconds(), time.perf_counter()
        subprocess.run([sys.executable, str(SCRIPT)], env=environment, check=True, capture_output=True)
        return time.perf_counter() - begin, _processor_seconds() - used


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
