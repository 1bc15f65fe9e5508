"""`vivace.profile` from outside: a Job in a child process, and scripts that know nothing of it."""

import contextlib
import dataclasses
import importlib.util
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
import torch

import vivace
from vivace.errors import ChildFailed, FolderError, InputError, JobError, PlanError
from vivace.files import take_lock
from vivace.inspection import measuring, store
from vivace.inspection.ceilings import Ceiling, Survey
from vivace.machine import Machine
from vivace.plan import Plan
from vivace.processes.launch import Child
from vivace.profiling import judge, run
from vivace.profiling.answering import answer
from vivace.profiling.run import NEW
from vivace.testing import TINY_JOBS

CEILINGS = {"matmul_fp32": 1e11, "convolution_fp32_nchw": 1e11, "copy_device": 1e10}
KEYS = {"shares", "bound_seconds", "share_of_limit", "verdicts", "memory", "page_path", "trace_path", "work"}
SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
data = TensorDataset(torch.randn(512, 64), torch.randint(4, (512,)))
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(int(sys.argv[1])):
    for inputs, labels in DataLoader(data, batch_size=64):
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
print("trained", sys.argv[1:])
sys.exit(7)
"""

EVALUATING = """
import importlib.util
import sys

assert importlib.util.find_spec("torch") is not None  # as transformers and datasets do before they import it
assert importlib.util.find_spec("torch") is not None
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(0)
data = TensorDataset(torch.randn(256, 3, 8, 8), torch.randint(4, (256,)))
model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Dropout(), nn.Flatten(), nn.Linear(512, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(4):
    for inputs, labels in DataLoader(data, batch_size=16, shuffle=True):
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.inference_mode():
            model(inputs)
print(*model[0].weight.flatten().tolist())
sys.exit(3)
"""

PROFILING = """
import json, sys
from pathlib import Path
from vivace.machine import Machine
from vivace import profile

machine = Machine.from_dict(json.loads(Path("machine.json").read_text()))
done = profile(command=[sys.executable, "train.py"], out="out", machine=machine, timed_seconds=0.1)
print(done.exit_code, len(done.verdicts))
"""


@pytest.fixture(scope="module")
def machine():
    found = vivace.inspect().to_dict()
    return Machine.from_dict({**found, "ceilings": CEILINGS})


@pytest.mark.parametrize("name", ["cnn", "gan"])
def test_a_job_is_profiled(name, machine, tmp_path):
    done = vivace.profile(TINY_JOBS[name](), out=tmp_path, machine=machine, timed_seconds=0.2)
    document = done.to_dict()
    assert set(document) >= KEYS
    assert sum(done.shares.values()) == pytest.approx(1)
    assert document["bound_seconds"] > 0
    assert done.page_path.read_text().startswith("<!doctype html>")
    assert json.loads(done.trace_path.read_text())["traceEvents"]
    saved = json.loads((tmp_path / "profile.json").read_text())
    assert saved["work"] == json.loads(json.dumps(document["work"]))
    work = saved["work"]
    assert work["format"] == 1
    assert work["batch_size"] == 16
    assert work["epochs"] == 1
    assert (
        work["steps_per_epoch"] == 4
    )  # batches, of which each step takes one, however often it goes backward
    assert work["device"] == (torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")
    assert work["waits_for_workers"] is False
    assert set(work["operators"]["matmul"]) == {"flops", "bytes", "bytes_fused", "count", "seconds"}
    assert ("convolution" in work["operators"]) == (name == "cnn")


def test_a_plan_is_profiled_with_its_techniques(machine, tmp_path):
    from vivace.techniques.bf16_autocast import Bf16Autocast

    plan = Plan([Bf16Autocast()])
    done = vivace.profile(TINY_JOBS["mlp"](), plan, out=tmp_path, machine=machine, timed_seconds=0.2)
    assert done.document["work"]["precision"] == "bfloat16"


def test_a_plan_that_scales_losses_skips_no_step_of_a_healthy_job(machine, tmp_path):
    plan = Plan.from_dict({"fp16_autocast": {}})
    done = vivace.profile(TINY_JOBS["mlp"](), plan, out=tmp_path, machine=machine, timed_seconds=0.2)
    assert done.document["work"]["precision"] == "float16"
    assert not {"overflow", "amp_misuse"} & {verdict["cause"] for verdict in done.verdicts}


def test_a_job_has_the_time_that_its_own_data_need_to_begin(machine, tmp_path, monkeypatch):
    """And what may hang is given up as before."""
    asked, made = [], []

    def ask(child, command, timeout, **arguments):
        made.append((command, (tmp_path / "made").exists()))
        asked.append(timeout)
        return Child.converse(child, command, timeout, None, **arguments)

    def data():
        (tmp_path / "made").touch()
        return TINY_JOBS["mlp"]().data()

    monkeypatch.setattr(Child, "ask", ask)
    job = dataclasses.replace(TINY_JOBS["mlp"](), data=data)
    vivace.profile(job, out=tmp_path / "out", machine=machine, timed_seconds=0.2)
    assert made == [("begin", False), ("run", True)]
    assert asked == [run.BEGIN_TIMEOUT, run.JOB_TIMEOUT]
    assert run.BEGIN_TIMEOUT > 12 * 3600


def test_a_broken_job_is_blamed(machine, tmp_path):
    with pytest.raises(JobError, match="model failed"):
        vivace.profile(
            vivace.Job(
                model=lambda: 1 // 0,
                data=list,
                loss=lambda model, batch: None,
                optimizer=lambda model: None,
            ),
            out=tmp_path,
            machine=machine,
        )


def test_neither_or_both_is_refused(tmp_path):
    with pytest.raises(InputError, match="either a JOB or a command"):
        vivace.profile(out=tmp_path)
    for given in ({"plan": vivace.Plan()}, {"strict": True}):
        with pytest.raises(InputError, match="need a JOB"):
            vivace.profile(command=["python", "train.py"], out=tmp_path, **given)


def test_a_plan_that_cannot_be_read_costs_no_earlier_profile(tmp_path, machine):
    (tmp_path / "profile.json").write_text('{"target": "python old.py"}')
    with pytest.raises(PlanError):
        vivace.profile(TINY_JOBS["mlp"](), plan=tmp_path / "typo.toml", out=tmp_path, machine=machine)
    assert (tmp_path / "profile.json").exists()


def test_ceilings_of_a_busy_machine_are_used_not_kept_and_said_not_to_hold(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    readings = {key: Ceiling(value, 0.6, 5, "") for key, value in CEILINGS.items()}
    monkeypatch.setattr(measuring, "survey", lambda *_, **__: Survey(dict(readings)))
    monkeypatch.setattr(measuring.ForeignLoad, "disturb", lambda self: False)
    done = vivace.profile(TINY_JOBS["mlp"](), out=tmp_path / "out", timed_seconds=0.1)
    assert done.document["bound_seconds"] > 0
    (said,) = [reason for reason in done.document["missing"] if reason.startswith("a limit that holds: ")]
    assert "apart; measure again when the machine is idle" in said
    assert "Missing: a limit that holds" in done.page_path.read_text()
    notes = answer({**done.document, "share_of_limit": 0.4}).notes
    assert any(note.startswith("The limit may lie higher: readings of ") for note in notes)
    assert not any(
        "may lie higher" in note for note in answer({**done.document, "share_of_limit": None}).notes
    )
    assert vivace.inspect().ceilings == {}


def test_an_unmodified_script_keeps_its_output_and_exit_code(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)
    known = vivace.inspect()
    store.save(
        known.measured_as,
        known.device.kind,
        Survey({key: Ceiling(value, 0.0, 1, "") for key, value in CEILINGS.items()}),
    )
    done = subprocess.run(
        [sys.executable, "-m", "vivace", "profile", "--out", "out", "--", "python", "train.py", "240"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 7, done.stderr
    assert done.stdout == "trained ['240']\n"
    document = json.loads((tmp_path / "out" / "profile.json").read_text())
    assert set(document) >= KEYS
    assert document["exit_code"] == 7
    assert document["bound_seconds"] > 0
    assert document["tune"] == "vivace run -- python train.py 240"  # no Job is needed


def test_a_script_that_evaluates_in_inference_mode_ends_as_alone(tmp_path, machine, capfd):
    script = tmp_path / "train.py"
    script.write_text(EVALUATING)
    command = [sys.executable, str(script)]
    alone = subprocess.run(command, capture_output=True, text=True, check=False)
    done = vivace.profile(command=command, out=tmp_path / "out", machine=machine, timed_seconds=0.1)
    assert capfd.readouterr().out == alone.stdout
    assert done.exit_code == alone.returncode == 3
    assert done.document["problems"] == []
    assert done.document["work"]["operators"]["convolution"]["flops"] > 0
    causes = [verdict["cause"] for verdict in done.verdicts]
    assert causes[0] == "ended"
    assert "healthy" not in causes
    assert "exit code 3" in done.verdicts[0]["evidence"]
    assert "Nothing is wrong" not in done.page_path.read_text()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_a_script_that_imports_transformers_first_is_profiled(tmp_path, machine):
    script = tmp_path / "train.py"
    script.write_text("import transformers\nfrom transformers import Trainer\n" + EVALUATING)
    command = [sys.executable, str(script)]
    done = vivace.profile(command=command, out=tmp_path / "out", machine=machine, timed_seconds=0.1)
    assert done.document["steps"] > 0


def test_python_is_the_one_on_the_path(tmp_path, machine, monkeypatch):
    own = tmp_path / "bin" / "python"
    own.parent.mkdir()
    own.write_text(f'#!/bin/sh\nWHOSE=mine exec {sys.executable} "$@"\n')
    own.chmod(0o755)
    monkeypatch.setenv("PATH", str(own.parent), prepend=os.pathsep)
    code = f"import os, pathlib; pathlib.Path({str(tmp_path / 'seen')!r}).write_text(os.environ['WHOSE'])"
    with pytest.raises(ChildFailed, match=f"did the command .{own}. start Python"):
        vivace.profile(command=["python", "-c", code], out=tmp_path / "out", machine=machine)
    assert (tmp_path / "seen").read_text() == "mine"


def test_where_no_python_is_on_the_path_vivaces_own_runs_and_says_so(tmp_path, machine, monkeypatch, capfd):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ChildFailed, match="nothing was recorded: did"):  # with exit code 0
        vivace.profile(command=["python", "-c", ""], out=tmp_path / "out", machine=machine)
    assert f"no 'python' is on the PATH; {sys.executable} runs the script" in capfd.readouterr().err


def test_a_torch_to_which_hooks_cannot_attach_is_named(tmp_path, machine, monkeypatch, capfd):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("__version__ = '0.4'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command = [sys.executable, "-c", "import torch; print(torch.__version__)"]
    with pytest.raises(
        ChildFailed, match=r"recorded: hooks cannot attach to its torch 0.4 .* runs on Python 3"
    ):
        vivace.profile(command=command, out=tmp_path / "out", machine=machine)
    shown = capfd.readouterr()
    assert shown.out == "0.4\n"
    assert shown.err.startswith("vivace: this run is not profiled, as hooks cannot attach to its torch 0.4")


def test_an_interrupted_script_is_judged_by_what_was_recorded(tmp_path, machine):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("int(sys.argv[1])", "10**9"))
    (tmp_path / "machine.json").write_text(json.dumps(machine.to_dict()))
    process = subprocess.Popen(
        [sys.executable, "-c", PROFILING],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        while not (tmp_path / "out" / NEW / "record.json").is_file() and process.poll() is None:
            time.sleep(0.1)
        scripts = psutil.Process(process.pid).children()
        while scripts:  # Python drops an interrupt that comes while it runs a finalizer: people press again
            os.killpg(process.pid, signal.SIGINT)
            _, scripts = psutil.wait_procs(scripts, timeout=60)
        output, _ = process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    code, verdicts = output.split()
    assert code == "130"
    assert int(verdicts) >= 1


def test_a_folder_with_anything_else_in_it_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("years")
    with pytest.raises(FolderError, match=r"not empty \(thesis.txt\)"):
        vivace.profile(command=["python"], out=tmp_path)
    with pytest.raises(FolderError, match="is a file"):
        vivace.profile(command=["python"], out=tmp_path / "thesis.txt")
    own = tmp_path / "own"
    own.mkdir()
    (own / "trace.json").write_text("of another profiler")
    with pytest.raises(FolderError, match=r"not empty \(trace.json\)"):
        vivace.profile(command=["python"], out=own)
    assert (own / "trace.json").read_text() == "of another profiler"
    profiled = tmp_path / "profiled"
    (profiled / "unfinished" / "chapters").mkdir(parents=True)
    (profiled / "lock").touch()
    with pytest.raises(FolderError, match=r"not empty \(unfinished\)"):
        vivace.profile(command=["python", "mistyped.py"], out=profiled)
    assert (profiled / "unfinished" / "chapters").is_dir()


def test_an_earlier_profile_is_replaced_and_named(tmp_path, machine):
    (tmp_path / "lock").touch()
    (tmp_path / "profile.json").write_text('{"target": "python old.py"}')
    (tmp_path / "record.json").write_text('{"clean_steps": 9}')
    (tmp_path / "rank-1" / "of_a_script").mkdir(parents=True)
    (tmp_path / "rank-1" / "record.json").write_text("{}")
    (tmp_path / "trace.json.tmp").write_text("torch's own, of a profile that was killed")
    (tmp_path / NEW).mkdir()
    (tmp_path / NEW / "record.json").write_text('{"clean_steps": 9}')  # of a profile that was killed
    done = vivace.profile(TINY_JOBS["mlp"](), out=tmp_path, machine=machine, timed_seconds=0.1)
    assert done.document["replaced"] == "python old.py"
    assert done.page_path.is_file()
    assert done.trace_path.is_file()
    names = "job.log lock profile.html profile.json record.json trace.json"
    assert sorted(file.name for file in tmp_path.iterdir()) == names.split()


def test_what_cannot_be_profiled_costs_no_earlier_profile(tmp_path, machine):
    (tmp_path / "lock").touch()
    earlier = {"profile.html", "profile.json", "record.json", "trace.json"}
    for name in earlier:
        (tmp_path / name).write_text(name)
    with pytest.raises(ChildFailed, match="nothing was recorded"):
        vivace.profile(command=[sys.executable, "nothere.py"], out=tmp_path, machine=machine)
    with pytest.raises(JobError, match=r"nothere\.py"):
        vivace.profile("nothere.py", out=tmp_path, machine=machine)
    assert {file.name for file in tmp_path.iterdir()} == {*earlier, "lock", "job.log"}
    assert all((tmp_path / name).read_text() == name for name in earlier)


LOCKING = """
import sys
from pathlib import Path
from vivace.errors import FolderError
from vivace.files import take_lock

try:
    take_lock(Path(sys.argv[1]), "profile")
except FolderError as error:
    Path(sys.argv[2]).write_text(str(error))
"""


def test_two_profiles_do_not_share_a_folder(tmp_path, machine):
    """The second would delete what the first has recorded, or the first show the second's figures."""
    out, told = tmp_path / "out", tmp_path / "told"
    out.mkdir()
    (out / "record.json").write_text("of the first")
    command = [sys.executable, "-c", LOCKING, str(out), str(told)]
    with take_lock(out, "profile"), pytest.raises(FolderError, match="another profile is running in"):
        vivace.profile(command=command, out=out, machine=machine)
    assert (out / "record.json").read_text() == "of the first"
    with pytest.raises(ChildFailed, match="nothing was recorded"):
        vivace.profile(command=command, out=out, machine=machine)
    assert "another profile is running in" in told.read_text()
    take_lock(out, "profile").close()


def test_a_full_disk_is_named(tmp_path, machine, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    with pytest.raises(FolderError, match=f"nothing was recorded: the disk of '{tmp_path}' is full"):
        vivace.profile(command=[sys.executable, "-c", ""], out=tmp_path, machine=machine)


CLEARING = """
import shutil, sys
import torch
from torch import nn

shutil.rmtree(sys.argv[1])
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(60):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).mean().backward()
    optimizer.step()
"""


def test_a_script_may_clear_the_folder_of_its_profile(tmp_path, machine):
    (tmp_path / "train.py").write_text(CLEARING)
    out = tmp_path / "runs" / "profile"
    command = [sys.executable, str(tmp_path / "train.py"), str(out.parent)]
    for earlier in (False, True):
        done = vivace.profile(command=command, out=out, machine=machine, timed_seconds=0.1)
        assert done.page_path.is_file()
        assert done.document["problems"] == []
        assert bool(done.document["replaced"]) == earlier


def test_a_folder_that_is_gone_at_the_end_is_told(tmp_path, machine):
    command = [sys.executable, "-c", f"import shutil; shutil.rmtree({str(tmp_path / 'out')!r})"]
    with pytest.raises(FolderError, match="the profile is lost: while it ran"):
        vivace.profile(command=command, out=tmp_path / "out", machine=machine)


def test_a_script_that_does_not_train_is_said_so(tmp_path, machine):
    command = [sys.executable, "-c", "print('hello')"]
    with pytest.raises(ChildFailed, match="nothing was recorded"):
        vivace.profile(command=command, out=tmp_path, machine=machine)


def test_a_script_reads_its_own_standard_input(tmp_path, machine):
    command = [sys.executable, "-c", "import sys; sys.exit(sys.stdin.read() != 'Ada')"]
    source, sink = os.pipe()
    os.write(sink, b"Ada")
    os.close(sink)
    with pytest.raises(ChildFailed, match="nothing was recorded: did"):  # with exit code 0
        vivace.profile(command=command, out=tmp_path, machine=machine, script_input=source)
    os.close(source)


def test_a_script_interrupted_before_its_first_step_was_interrupted(tmp_path, machine, monkeypatch):
    class Interrupted:
        def __init__(self, *_, **__):
            (tmp_path / NEW / "record.json").write_text('{"state": "warm"}')

        def wait(self, timeout=None):
            if timeout is None:
                raise KeyboardInterrupt
            return 1

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        vivace.profile(command=["python", "train.py"], out=tmp_path, machine=machine)


def test_a_missing_program_is_one_sentence(tmp_path, machine):
    with pytest.raises(InputError, match="no program 'no-such-program'"):
        vivace.profile(command=["no-such-program"], out=tmp_path, machine=machine)


IN_PROCESSES = """
import os, sys
import torch
import torch.multiprocessing as multiprocessing
from torch import nn

def train(rank, steps=60):
    torch.set_num_threads(1)
    if sys.argv[1] == "ranks":
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[2]}
        torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(rank)
    model = nn.Linear(64, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()

if __name__ == "__main__":
    if sys.argv[1] == "ranks":
        multiprocessing.spawn(train, args=(), nprocs=2)
    elif sys.argv[1] == "fork":
        process = multiprocessing.get_context("fork").Process(target=train, args=(0,))
        process.start()
        process.join()
    else:
        train(0)
        os._exit(0)
"""


@pytest.mark.parametrize("way", ["ranks", "fork", "left"])
def test_what_processes_of_a_script_train_is_recorded_however_they_end(tmp_path, machine, way, capfd):
    script = tmp_path / "train.py"
    script.write_text(IN_PROCESSES)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, str(script), way, port]
    done = vivace.profile(command=command, out=tmp_path / "out", machine=machine, timed_seconds=0.1)
    assert done.exit_code == 0
    assert "ERROR" not in capfd.readouterr().err
    assert done.document["memory"]["peak_bytes"] is not None
    assert [reason for reason in done.document["missing"] if "ended" in reason] == []
    assert done.document["work"]["batches_at_once"] == (2 if way == "ranks" else 1)
    left = {file.name for file in (tmp_path / "out").iterdir()}
    ranks = {"rank-1"} if way == "ranks" else set()
    assert left == {"lock", "profile.html", "profile.json", "record.json", "trace.json"} | ranks


def test_a_request_to_end_goes_to_the_script(tmp_path, machine):
    script = tmp_path / "train.py"
    script.write_text("import pathlib, time\npathlib.Path('begun').touch()\ntime.sleep(600)\n")
    (tmp_path / "machine.json").write_text(json.dumps(machine.to_dict()))
    process = subprocess.Popen(
        [sys.executable, "-c", PROFILING], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    while not (tmp_path / "begun").exists() and process.poll() is None:
        time.sleep(0.1)
    (child,) = psutil.Process(process.pid).children()
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert not child.is_running()
    assert "nothing was recorded: signal 15 ended the script before" in errors


def test_a_command_in_one_text_is_told_its_words(tmp_path):
    with pytest.raises(
        InputError, match=r"the text 'python train.py'; give its words: \['python', 'train.py'\]"
    ):
        vivace.profile(command="python train.py", out=tmp_path)


def told(tmp_path, verdicts, bounds, details=False):
    """What the terminal says of a profile, as one line."""
    from rich.console import Console

    from vivace.profiling.run import Profiled
    from vivace.profiling.table import draw

    document = {
        "target": "train.py:job",
        "tune": "vivace tune train.py:job",
        "verdicts": verdicts,
        "bounds": bounds,
        "shares": {"forward": 1.0},
        "step_seconds": 0.1,
        "samples_per_second": 10.0,
        "roofline": [],
        "memory": {},
        "missing": [],
    }
    console = Console(width=80, record=True, file=io.StringIO())
    draw(Profiled(document, tmp_path / "page.html", None), console, details=details)
    return " ".join(console.export_text().split())


REASON = {"evidence": "size mismatch of args[0] [/x]", "gain": {"low": 1.0, "high": 2.0}, "next": "pad"}
HEALTHY = {"evidence": "nothing is wrong: it runs", "gain": {"low": 1.0, "high": 1.0}, "next": "tune"}


def test_evidence_with_brackets_is_shown_as_it_is(tmp_path):
    shown = told(tmp_path, [{"cause": "recompiles", **REASON}], [{"name": "small_batch", **REASON}], True)
    assert "recompiles size mismatch of args[0] [/x]" in shown
    assert "bound by small batch size mismatch" in shown
    assert "1.00-2.00x as fast without this fault: recompiles." in shown


def test_a_step_that_is_bound_is_not_called_healthy_above_its_bound(tmp_path):
    bound = told(tmp_path, [{"cause": "healthy", **HEALTHY}], [{"name": "small_batch", **REASON}])
    assert "1.00-2.00x as fast at best, without what bounds it (small batch); nothing is wrong." in bound
    assert "healthy" not in bound
    assert "Nothing is wrong: it runs" not in bound
    healthy = told(tmp_path, [{"cause": "healthy", **HEALTHY}], [])
    assert healthy.startswith("Nothing is wrong: it runs.")
    assert healthy.endswith("Next: vivace tune train.py:job")


@pytest.mark.parametrize(
    ("code", "advice"),
    [(1, "mend what ended it"), (130, "run for longer"), (143, "run for longer"), (137, "memory was full")],
)
def test_what_ended_a_script_is_mended_where_it_is_its_own(code, advice):
    assert advice in judge._ended(code).next
