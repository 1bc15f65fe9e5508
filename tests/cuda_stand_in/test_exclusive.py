"""A GPU in compute mode "exclusive process": the first process that opens it has it alone."""

from pathlib import Path

import pytest

JOB = f"{Path(__file__).with_name('job.py')}:job"

HOLDS = """
import subprocess, sys
import torch
torch.ones(1, device="cuda")
other = [sys.executable, "-c", "import torch; torch.ones(1, device='cuda')"]
print(subprocess.run(other, capture_output=True, text=True).stderr)
"""


def test_the_stand_in_is_exclusive(stand_in, tmp_path):
    assert "busy or unavailable" in stand_in.python(HOLDS, exclusive=tmp_path / "lock")


MEASURES = """
import sys
from pathlib import Path
from vivace.processes.launch import Source
from vivace import inspect
from vivace.ledger import Code, Ledger
from vivace.measuring import paired
from vivace.plan import Plan
from vivace.technique import Numerics
from vivace.tuning import bench as bench_module
from vivace.tuning.bench import Bench
paired.BLOCK_SECONDS = 0.05
bench_module.MOST_LATE_ROUNDS = 1  # a plan beside itself is as often undecided as not
ledger = Ledger(Path(sys.argv[2], "ledger.jsonl"))
bench = Bench(Source(sys.argv[1]), inspect(), ledger, lambda *_: None, allow=Numerics.ROUNDING, memory=None)
try:
    bench.check()
    bench.open_reference()
    found = bench.measure(Plan(), seconds=4, comparing=1, role="baseline_default", strict=False)
    again = bench.confirm(Plan(), seconds=1, round_seconds=1)
    # Each is opened for itself: a busy machine may change between them, which is said.
    print(*(one.code if one.code == Code.UNSTEADY else f"{one.status}{one.reason}" for one in (found, again)))
finally:
    bench.close()
"""


@pytest.mark.parametrize("settings", [{}, {"hides_mode": 1}], ids=["told by NVML", "found out"])
def test_plans_are_measured_in_turns(stand_in, tmp_path, settings):
    printed = stand_in.python(MEASURES, JOB, tmp_path, exclusive=tmp_path / "lock", **settings)
    assert set(printed.split()) <= {"measured", "unsteady"}, printed
