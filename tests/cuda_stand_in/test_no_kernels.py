"""A GPU whose kernels torch's profiler does not see, as under another profiler and on virtual GPUs."""

import json
from pathlib import Path

JOB = f"{Path(__file__).with_name('job.py')}:job"

CONFIRM = """
import sys
from vivace.session.opening import start
from vivace import inspect
from vivace.job import load
from vivace.plan import Plan
from vivace.observing.observe import observe
job, machine, plan = load(sys.argv[1]), inspect(), Plan.from_dict({"tf32": {}})
with start(job, Plan(), machine) as session:
    reference = observe(session, list(job.data()))
with start(job, plan, machine) as session:
    seen = observe(session, list(job.data()))
    print(seen.kernels, plan.techniques[0].confirm(seen, reference))
"""


PROFILE = """
from vivace.command.cli import main
from vivace.profiling import run
run.CEILING_SECONDS = 2.0  # the stand-in's say nothing
main()
"""


def test_tf32_is_proven_by_numbers(stand_in):
    """Kernels do nothing here, so the product is wrong by all of its size."""
    printed = stand_in.python(CONFIRM, JOB)
    assert printed.startswith("{} this machine shows no kernels")
    assert "off by 1e+00" in printed


def test_a_profile_says_so_and_gives_no_times(stand_in, tmp_path):
    done = stand_in.run(PROFILE, "profile", JOB, "--out", tmp_path / "profile", "--json")
    assert done.returncode == 0, done.stderr
    profile = json.loads(done.stdout)
    assert any("shows no kernels" in reason for reason in profile["missing"])
    assert (profile["busy_share"], profile["slowest"]) == (None, [])
    assert not any(row["seconds"] or row["share"] for row in profile["roofline"])
