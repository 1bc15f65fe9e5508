"""What a profile costs a script: wall and processor seconds of the same training, with and without.

    scripts/bench profile_cost [--steps 2000] [--pairs 3]

The script trains a fixed number of steps of a small network; runs alternate. Demanded: at most 3 %.
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

SCRIPT = Path(__file__).resolve().parent / "planted" / "healthy_cnn.py"
INJECT = Path(__file__).resolve().parents[1] / "src" / "vivace" / "profile" / "inject"
DEMANDED = 1.03


def main() -> None:
    """Alternate both, print the ratios, and leave with 1 where the median is more than demanded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--pairs", type=int, default=3)
    chosen = parser.parse_args()
    walls, processors = [], []
    for _ in range(chosen.pairs):
        alone, profiled = run(chosen.steps, False), run(chosen.steps, True)
        walls.append(profiled[0] / alone[0])
        processors.append(profiled[1] / alone[1])
        print(f"alone {alone[0]:.1f} s, profiled {profiled[0]:.1f} s: {walls[-1]:.3f}", flush=True)
    print(f"wall {statistics.median(walls):.3f}, processor time {statistics.median(processors):.3f}")
    if statistics.median(processors) > DEMANDED:
        raise SystemExit(f"more than the {DEMANDED:.2f} that are demanded")


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
