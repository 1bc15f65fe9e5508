"""Child processes: isolation of crashes, hangs, output and standard input; errors by their own class."""

import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

import vivace
from vivace.errors import ChildFailed, JobError, Refused, TimedOut
from vivace.processes.launch import Child, Source, _Zygote, _zygote, own_error

HERE = "tests_launch_entry:Handler"
SCALE = 3


ENTRY = """
import os, sys, time, threading, torch
from vivace.errors import Refused

class Handler:
    def __init__(self, job, **arguments):
        self.job, self.arguments = job, arguments
    def echo(self, **arguments): return [self.arguments, arguments]
    def lose(self, value): return float(self.job.loss(None, torch.tensor(float(value))))
    def refuse(self): raise Refused("it never acts")
    def abort(self): os.abort()
    def leave(self): os._exit(3)
    def orphan(self, file):
        pid = os.fork()
        if not pid: time.sleep(1000)
        with open(file, "w") as noted: noted.write(str(pid))
        os.abort()
    def sleep(self, seconds): time.sleep(seconds)
    def exhaust(self): raise RuntimeError("DefaultCPUAllocator: can't allocate memory: 7 bytes")
    def speak(self):
        print("to standard output")
        print("to standard error", file=sys.stderr)
        return sys.stdin.read()
    def helper(self):
        parent, pid = os.getpid(), os.fork()
        if not pid:  # it watches its parent, as a loader's worker does
            while os.getppid() == parent: time.sleep(0.1)
            os._exit(0)
        return pid
    def variable(self, name): return os.environ.get(name)
    def where(self): return [os.getpid(), os.getsid(0), torch.get_num_threads()]
"""


@pytest.fixture
def source(tmp_path, monkeypatch):
    (tmp_path / "tests_launch_entry.py").write_text(ENTRY)
    monkeypatch.syspath_prepend(str(tmp_path))
    scale = SCALE
    job = vivace.Job(
        model=lambda: torch.nn.Linear(1, 1),
        data=list,
        loss=lambda model, batch: batch * scale,
        optimizer=lambda model: None,
    )
    return Source(job)


def test_a_job_of_closures_travels_and_commands_answer(source):
    with Child(HERE, source, {"a": 1}) as child:
        assert child.ask("echo", 60, b=[2, None]) == [{"a": 1}, {"b": [2, None]}]
        assert child.ask("lose", 60, value=2) == 6.0


def test_an_error_comes_back_under_its_own_class_and_the_child_lives_on(source):
    with Child(HERE, source) as child:
        with pytest.raises(Refused, match="it never acts"):
            child.ask("refuse", 60)
        with pytest.raises(ChildFailed, match="out of memory"):
            child.ask("exhaust", 60)
        assert child.ask("lose", 60, value=1) == 3.0


@pytest.mark.fault(37, 39)
def test_a_crash_is_named(source):
    with Child(HERE, source) as child, pytest.raises(ChildFailed, match="died from SIGABRT"):
        child.ask("abort", 60)
    with Child(HERE, source) as child, pytest.raises(ChildFailed, match="exit code 3"):
        child.ask("leave", 60)


@pytest.mark.fault(37, 39)
def test_a_crash_is_noticed_though_what_the_child_has_forked_lives_on(source, tmp_path, until):
    """It holds the child's ends of the pipes, so that these do not close."""
    file = tmp_path / "pid"
    with Child(HERE, source) as child, pytest.raises(ChildFailed, match="died from SIGABRT"):
        child.ask("orphan", 60, file=str(file))
    pid = int(file.read_text())
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


@pytest.mark.timeout(60)  # what it is about: it waited for ever
def test_a_command_longer_than_a_pipe_has_a_limit_too(source):
    """The child does not read it, as one that hangs while it loads the job."""
    with Child(HERE, source) as child:
        child.ask("echo", 60)
        os.kill(child.pid, signal.SIGSTOP)
        with pytest.raises(TimedOut, match="no answer to 'echo' within 1 s"):
            child.ask("echo", 1.0, text="a" * 2**18)


@pytest.mark.fault(37)
def test_a_hang_is_stopped(source):
    begin = time.monotonic()
    with Child(HERE, source) as child:
        child.ask("echo", 60)
        with pytest.raises(ChildFailed, match="no answer to 'sleep' within 1 s"):
            child.ask("sleep", 1.0, seconds=1000)
    assert time.monotonic() - begin < 900


def test_what_a_child_prints_goes_to_the_log_and_its_input_is_empty(source, tmp_path, capfd):
    log = tmp_path / "children.log"
    with Child(HERE, source, log=log) as child:
        assert child.ask("speak", 60) == ""
    text = log.read_text()
    assert "to standard output" in text
    assert "to standard error" in text
    assert capfd.readouterr().out == ""


def test_a_child_has_a_terminal_session_of_its_own_and_dies_with_its_parent(source):
    with Child(HERE, source) as child:
        pid, session, _ = child.ask("where", 60)
        assert session == pid != os.getsid(0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
def test_a_killed_parent_leaves_neither_a_child_nor_its_environment(fork_server, tmp_path, until):
    """Nor what a child has started, though both are halted, as they are while another one is timed."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, pathlib, signal, sys, tempfile, time, vivace\n"
        f"tempfile.tempdir = {str(temporary)!r}\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from vivace.processes.launch import Child, Source\n"
        "job = vivace.Job(model=lambda: None, data=list, loss=max, optimizer=str)\n"
        f"child = Child({HERE!r}, Source(job))\n"
        f"path = pathlib.Path({str(tmp_path)!r}, 'pid')\n"
        "path.with_suffix('.tmp').write_text(f'{child.pid} {child.ask(\"helper\", 60)}')\n"
        "os.killpg(child.pid, signal.SIGSTOP)\n"
        "path.with_suffix('.tmp').rename(path)\n"
        "time.sleep(60)\n"
    )
    (tmp_path / "tests_launch_entry.py").write_text(ENTRY)
    parent = fork_server.Process(target=runpy.run_path, args=(str(script),))
    parent.start()
    until((tmp_path / "pid").exists, 200)
    pids = (tmp_path / "pid").read_text().split()
    parent.kill()
    parent.join()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 20)
    assert list(temporary.iterdir()) == []


def test_children_begin_in_the_folder_in_which_the_job_was_named(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(
        "import os, vivace\nos.makedirs('elsewhere', exist_ok=True)\nos.chdir('elsewhere')\n"
        "job = vivace.Job(model=lambda: None, data=list, loss=lambda m, b: 2 * b, optimizer=str)\n"
    )
    named = Source("job.py:job")
    named.load()
    assert Path.cwd() == tmp_path / "elsewhere"
    with Child(HERE, named) as child:
        assert child.ask("lose", 60, value=2) == 4.0


def test_a_job_that_cannot_travel_is_refused_with_the_way_out():
    import threading

    lock = threading.Lock()
    job = vivace.Job(model=lambda: lock, data=list, loss=max, optimizer=str)
    with pytest.raises(JobError, match=r"cannot be sent to a child process .*file\.py:name"):
        Child(HERE, Source(job))


def test_nothing_starts_cuda_before_the_fork():
    """Asking for GPUs through CUDA starts it, and a forked child could not start it again."""
    code = (
        "import importlib, torch\n"
        "from vivace.processes.zygote import PRELOADED\n"
        "def started(): raise SystemExit('an import asked CUDA for its devices')\n"
        "torch._C._cuda_getDeviceCount = started\n"
        "for name in PRELOADED: importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads /proc")
def test_an_interrupt_does_not_wait_for_the_zygotes_imports():
    zygote = _Zygote()
    zygote.close()
    assert zygote.process.returncode == -signal.SIGKILL


def test_the_zygote_asks_the_drivers_library_for_gpus_and_children_ask_as_they_like(source):
    with Child(HERE, Source(source)) as child:
        environment = child.ask("variable", 20, name="PYTORCH_NVML_BASED_CUDA_CHECK")
        zygote = Path(f"/proc/{_zygote().process.pid}/environ").read_bytes()
    assert b"PYTORCH_NVML_BASED_CUDA_CHECK=1" in zygote
    assert environment == os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK")


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "CUDA error: out of memory",
    ],
)
def test_a_library_of_the_gpu_that_gets_no_memory_is_out_of_memory(text):
    failed = own_error(RuntimeError(text))
    assert isinstance(failed, ChildFailed)
    assert failed.lacked_memory
    assert str(failed).startswith("out of memory: RuntimeError")
