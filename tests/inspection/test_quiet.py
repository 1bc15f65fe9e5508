import os
import subprocess
import sys
import time

import pytest

from vivace.inspection.quiet import ForeignLoad, Slowed, _seconds, computed_and_waited

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


def test_what_a_process_that_has_ended_used_is_ours_too():
    """As a loader's workers, which end with each epoch."""
    spent = "import time\nwhile time.process_time() < 0.5: pass"
    before = _seconds([os.getpid()])
    subprocess.run([sys.executable, "-c", spent], check=True)
    assert _seconds([os.getpid()]) - before >= 0.4


def test_how_slow_a_thread_is_follows_what_others_do_now():
    clocks = iter([(1.0, 0.5), (1.1, 5.0), (2.0, 3.5), (3.0, 3.5), None, (5.0, 9.5)])
    slowed = Slowed(lambda: next(clocks))
    assert slowed() == 1.0, "it has not computed for long enough to say"
    assert slowed() == 4.0
    assert slowed() == 1.0, "the others have gone"
    assert slowed() == 1.0
    assert slowed() == 4.0
    assert Slowed(lambda: None)() == 1.0
    found = computed_and_waited()
    assert found is None or min(found) >= 0.0
