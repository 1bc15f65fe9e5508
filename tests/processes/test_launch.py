"""Child processes end with what started them, however young they are."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from vivace.errors import ChildFailed
from vivace.processes import launch, pipes
from vivace.processes.launch import Child, Source

JOB = Path(__file__).parents[1] / "scenes" / "served.py"
DYING = "import ctypes, time; ctypes.CDLL(None).prctl(1, 9); print(flush=True); time.sleep(600)"


@pytest.fixture
def helper(tmp_path, monkeypatch):
    """The entry of a child that starts a process, halts it, and says which it is; or ends by a signal."""
    text = "import os, signal, subprocess\n\nclass Helper:\n    def __init__(self, job): ...\n"
    text += "    def halted(self):\n        found = subprocess.Popen(['sleep', '600'])\n"
    text += "        os.kill(found.pid, signal.SIGSTOP)\n        return found.pid\n"
    text += "    def end(self, number):\n        os.kill(os.getpid(), number)\n        signal.pause()\n"
    (tmp_path / "helping_children.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "helping_children:Helper"


def numbers_of_descriptors():
    return {int(entry.name) for entry in Path("/proc/self/fd").iterdir()}


def ends(pid, seconds=20.0):
    """Does a process end, or is it a zombie, within these seconds?"""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.timeout(60)  # what it is about: it waited for ever
def test_a_child_that_was_forked_a_moment_ago_is_killed_too():
    for _ in range(5):
        with pytest.raises(ZeroDivisionError), Child("vivace.measuring.worker:Worker", Source(f"{JOB}:job")):
            raise ZeroDivisionError


def test_a_path_among_the_folders_of_modules_does_not_keep_children_from_starting(monkeypatch):
    """Python passes over it; in the text of a program it is a name that nobody knows."""
    told = []
    monkeypatch.setattr(launch.subprocess, "Popen", lambda command, **_: told.append(command))
    monkeypatch.setattr("sys.path", ["one", Path("two")])
    launch._Zygote()._socket.close()
    assert "sys.path[:] = ['one'];" in told[0][2]


@pytest.fixture
def many_files():
    """All numbers of descriptors up to 1100 are taken: `select` knows none above 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("this machine allows fewer than 2,048 open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    with contextlib.ExitStack() as stack:
        while stack.enter_context(open(os.devnull)).fileno() < 1100:
            pass
        yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_a_person_may_have_a_thousand_files_open(helper):
    with Child(helper, Source(f"{JOB}:job")) as child:
        assert child.ask("halted", 60) > 0


@pytest.mark.usefixtures("many_files")
def test_ends_of_pipes_with_large_numbers_are_waited_for():
    read, write = os.pipe()
    assert read > 1023
    assert pipes.ready([read], [write], 0) == {write}
    assert pipes.ready([read], seconds=0) == set()
    os.close(write)
    assert pipes.ready([read]) == {read}
    os.close(read)


def test_a_process_that_a_thread_has_started_outlives_the_thread():
    """A child would end with the thread that was the first to need one, whoever has use for it then."""
    found = []

    def start():
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
        found.append(launch._from_a_lasting_thread([sys.executable, "-Sc", DYING], **options))
        found[0].stdout.readline()

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    with found[0] as process:
        time.sleep(0.3)  # of the kernel's, to kill it
        assert process.poll() is None
        process.kill()


def test_what_cannot_be_started_from_a_thread_says_so():
    found = []

    def start():
        with pytest.raises(FileNotFoundError):
            launch._from_a_lasting_thread(["/nowhere/at/all"])
        found.append(True)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert found


def test_children_of_a_process_that_is_killed_end_with_it_also_where_a_thread_has_begun(tmp_path):
    lines = [
        "import os, signal, subprocess, sys, threading",
        "from vivace.processes import launch",
        "def start():",
        f"    found = launch._from_a_lasting_thread([sys.executable, '-Sc', {DYING!r}], stdout=-1)",
        "    found.stdout.readline()",
        "    print(found.pid, flush=True)",
        "thread = threading.Thread(target=start)",
        "thread.start()",
        "thread.join()",
        "os.kill(os.getpid(), signal.SIGKILL)",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert ends(int(done.stdout))


def test_what_a_child_has_halted_ends_where_what_starts_children_was_killed(helper, monkeypatch):
    monkeypatch.setattr(launch, "_zygotes", {})
    child = Child(helper, Source(f"{JOB}:job"))
    halted = child.ask("halted", 60)
    before = numbers_of_descriptors()
    launch._zygote().process.kill()
    launch._zygotes[os.getpid()].process.wait()
    with pytest.raises(ChildFailed, match="that starts child processes has died"):
        child.ask("halted", 60)
    assert ends(halted)
    assert launch._zygotes[os.getpid()].ended  # so that another one is started
    child.close()  # of whose death the caller knows
    assert numbers_of_descriptors() < before


def test_a_child_that_cannot_be_started_leaves_no_descriptor(helper, monkeypatch):
    def broken(self, descriptors):
        raise BrokenPipeError

    monkeypatch.setattr(launch._Zygote, "fork", broken)
    launch.begin()
    before = numbers_of_descriptors()
    with pytest.raises(ChildFailed, match="that starts child processes has died"):
        Child(helper, Source(f"{JOB}:job"))
    assert numbers_of_descriptors() == before


def test_ctrl_c_while_a_child_is_forked_leaves_what_starts_the_others_alive(helper, monkeypatch):
    monkeypatch.setattr(launch, "_zygotes", {})
    Child(helper, Source(f"{JOB}:job")).close()
    zygote = psutil.Process(launch._zygote().process.pid)

    def interrupted(child):
        raise KeyboardInterrupt

    zygote.suspend()  # so that it forks when nobody listens any more
    with monkeypatch.context() as patch:
        patch.setattr(Child, "_number", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Child(helper, Source(f"{JOB}:job"))
    zygote.resume()
    with Child(helper, Source(f"{JOB}:job")) as child:
        assert psutil.Process(child.pid).ppid() == zygote.pid
        left = [one.pid for one in zygote.children() if one.pid != child.pid]
        assert all(map(ends, left))
    launch._zygote().close()


def test_a_signal_without_a_name_is_told_by_its_number(helper):
    with (
        Child(helper, Source(f"{JOB}:job")) as child,
        pytest.raises(ChildFailed, match="died from signal 42"),
    ):
        child.ask("end", 60, number=42)
