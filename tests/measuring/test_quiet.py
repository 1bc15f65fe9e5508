import os
import subprocess
import sys
import time

import pytest

from vivace.measuring.quiet import ForeignLoad

SPIN = "import sys, time; end = time.monotonic() + 20\nwhile time.monotonic() < end: pass"
ORPHANED = f"""
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", {SPIN!r}], stdout=subprocess.DEVNULL).pid)
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a core for each of two processes")
def test_a_stranger_is_seen_beside_a_busy_child_of_ours():
    child = subprocess.Popen([sys.executable, "-c", SPIN])
    stranger = int(
        subprocess.run([sys.executable, "-c", ORPHANED], stdout=subprocess.PIPE, check=True).stdout
    )
    try:
        others = ForeignLoad([child.pid])
        time.sleep(1.0)
        assert others.disturb()
        assert others.sentence()
    finally:
        child.kill()
        child.wait()
        os.kill(stranger, 9)
