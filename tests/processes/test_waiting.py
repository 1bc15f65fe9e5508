"""Beside others that compute, threads which wait for each other soon sleep; alone, and where the person has
decided, nothing is changed.
"""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vivace.processes import waiting
from vivace.processes.waiting import SHORT

CLOCK = os.sysconf("SC_CLK_TCK")


def stat(computed, nice=0.0):
    """What /proc/stat says where each of our cores has computed for so many seconds."""
    user, kind = int(computed * CLOCK), int(nice * CLOCK)
    return "".join(f"cpu{core} {user} {kind} 0 9 0 0 0 0\n" for core in sorted(os.sched_getaffinity(0)))


@pytest.fixture
def looked(monkeypatch):
    """What is decided where the cores computed for these shares of the time in which it looks."""

    def found(share, nice=0.0, priority=0, child=0.0):
        cores = len(os.sched_getaffinity(0))
        clock, own = iter([0.0, 10.0]), iter([{1: 5.0}, {1: 5.0, 2: 10 * child * cores}])
        texts = iter([stat(0.0), stat(10 * share, 10 * nice)])
        monkeypatch.setattr(Path, "read_text", lambda self, encoding: next(texts))
        monkeypatch.setattr(waiting.time, "monotonic", lambda: next(clock))
        monkeypatch.setattr(waiting, "_worked", lambda: next(own))
        monkeypatch.setattr(waiting.time, "sleep", lambda seconds: None)
        monkeypatch.setattr(os, "getpriority", lambda which, who: priority)
        return waiting.waiting()

    for name in waiting.OWN:
        monkeypatch.delenv(name, raising=False)
    return found


@pytest.mark.parametrize(
    ("share", "nice", "priority", "short"),
    [
        (0.0, 0.0, 0, False),
        (0.2, 0.0, 0, False),
        (0.5, 0.0, 0, True),
        (0.1, 0.9, 0, False),
        (0.1, 0.9, 10, True),
    ],
)
def test_threads_sleep_soon_where_others_compute_at_our_priority(looked, share, nice, priority, short):
    assert looked(share, nice, priority) == (SHORT if short else {})


@pytest.mark.parametrize(("child", "short"), [(0.6, False), (0.3, True)])
def test_what_this_process_has_started_is_no_other(looked, child, short):
    """Such as what imports torch for the children to come, while this process does."""
    assert looked(0.7, child=child) == (SHORT if short else {})


def test_what_this_process_has_started_is_found_with_what_it_computes():
    busy = "subprocess.Popen([sys.executable, '-c', 'while 1: pass'])"
    code = f"import subprocess, sys\nprint({busy}.pid, flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1) as child:
        grandchild = int(child.stdout.readline())
        try:
            before = waiting._worked()
            while waiting._worked()[grandchild] < before.get(grandchild, 0.0) + 0.05:
                pass
            assert {os.getpid(), child.pid, grandchild} <= before.keys()
        finally:
            os.kill(grandchild, signal.SIGKILL)
            child.kill()


@pytest.mark.parametrize("name", waiting.OWN)
def test_what_the_person_has_set_stays(looked, monkeypatch, name):
    monkeypatch.setenv(name, "5")
    assert looked(1.0) == {}


def test_what_was_found_as_the_command_began_stays(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    for name, value in SHORT.items():
        monkeypatch.setenv(name, value)
    assert waiting.crowded()
    monkeypatch.setenv("GOMP_SPINCOUNT", "5")  # by the person: nothing is looked at
    assert not waiting.crowded()


def test_a_child_beside_busy_processes_has_it():
    """The whole way: a command that starts a child while others use every core."""
    job = Path(__file__).parents[1] / "scenes" / "served.py"
    code = (
        "from vivace.processes.launch import Child, Source\n"
        f"child = Child('vivace.measuring.worker:Worker', Source('{job}:job'))\n"
        "print(open(f'/proc/{child.pid}/environ').read().replace(chr(0), chr(10)))\n"
        "child.close()\n"
    )
    environment = {key: value for key, value in os.environ.items() if key not in waiting.OWN}
    with contextlib.ExitStack() as stack:
        for _ in range(2 * len(os.sched_getaffinity(0))):
            busy = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", "print(1, flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
                )
            )
            stack.callback(busy.kill)
            assert busy.stdout.readline()  # it computes now
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
        )
    assert f"GOMP_SPINCOUNT={SHORT['GOMP_SPINCOUNT']}" in done.stdout
