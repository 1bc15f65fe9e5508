"""`vivace run` from outside: scripts that know nothing of it, in their own processes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vivace
from vivace.errors import FolderError, InputError, PlanError
from vivace.files import take_lock
from vivace.live.errand import VARIABLE, Errand
from vivace.live.launch import prepared

SCRIPTS = Path(__file__).parent / "scripts"
SOURCE = Path(vivace.__file__).parents[1]
LONG, SHORT = (
    ("--samples", "4000"),
    ("--samples", "64"),
)  # batches of 8: of the first number a search is worth its time


def vivace_run(*words, cwd, source="", environment=None, code=None):
    """Run the command line, and return what became of it; `code` is the exit code to expect."""
    environment = {"PYTHONPATH": os.pathsep.join([str(SOURCE), str(SCRIPTS)]), **(environment or {})}
    done = alone(sys.executable, "-m", "vivace", "run", *words, cwd=cwd, source=source, **environment)
    assert code is None or done.returncode == code, done.stderr
    return done


def said(done):
    """What was said at the end, as one line."""
    return " ".join(done.stderr.replace("vivace: ", "").split())


def alone(*words, cwd, source="", **environment):
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        words, cwd=cwd, env=environment, input=source, capture_output=True, text=True, timeout=600
    )


@pytest.mark.slow
def test_a_script_is_faster_and_all_else_is_its_own(tmp_path):
    script = [sys.executable, str(SCRIPTS / "mnist.py"), "--epochs", "1"]
    words = [*script, *LONG, "--save-model", "model.pt"]
    impatient = {"environment": {"IMPATIENT": "1"}}
    mine = vivace_run("--", *words, cwd=tmp_path, source="hello\n", code=3, **impatient)
    told = json.loads((tmp_path / "runs/run/run.json").read_text())
    assert told["outcome"] == "faster", mine.stderr
    assert "bf16_autocast" in told["plan"]
    assert told["ratio"]["low"] > 1.0
    assert "vivace: Same model: yes." in mine.stderr
    assert "vivace: Next: vivace run --plan runs/run/plan.toml -- " in mine.stderr
    assert "Same model: yes" in (tmp_path / "runs/run/run.html").read_text()
    assert mine.stdout == "epoch 0\nread hello\n"
    ledger = (tmp_path / "runs/run/ledger.jsonl").read_text().splitlines()
    records = [json.loads(line)["record"] for line in ledger]
    assert records.count("adopted") >= 1

    found = torch.load(tmp_path / "model.pt")
    theirs = alone(*script, *SHORT, "--save-model", "alone.pt", cwd=tmp_path)
    assert theirs.returncode == 3
    own = torch.load(tmp_path / "alone.pt")
    assert list(found["model"]) == list(own["model"])
    for name, value in found["model"].items():
        assert value.dtype == own["model"][name].dtype
        assert value.stride() == own["model"][name].stride()
    settings = [
        {k: v for k, v in f["optimizer"]["param_groups"][0].items() if k != "lr"} for f in (found, own)
    ]
    assert settings[0] == settings[1]

    again = vivace_run("--plan", "runs/run/plan.toml", "--", *words, cwd=tmp_path, code=3, **impatient)
    told = json.loads((tmp_path / "runs/run/run.json").read_text())
    assert told["outcome"] == "faster", again.stderr
    assert told["tried"][0]["answer"] == "given"


def test_results_are_bit_equal_where_nothing_inexact_acts(tmp_path):
    words = [sys.executable, str(SCRIPTS / "mnist.py"), "--epochs", "2", *SHORT, "--exact"]
    theirs = alone(*words, cwd=tmp_path)
    mine = vivace_run("--", *words, cwd=tmp_path, code=3)
    assert mine.stdout == theirs.stdout
    assert theirs.returncode == 3


@pytest.mark.parametrize("inside", [True, False])
def test_processes_that_torchrun_starts_share_a_plan(tmp_path, inside):
    """`torchrun -m vivace run -- train.py`, and `vivace run -- torchrun train.py`."""
    (tmp_path / "plan.toml").write_text("format = 1\n\n[techniques.fused_optimizer]\n")
    shutil.copy(SCRIPTS / "ranks.py", tmp_path / "train.py")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = ["-m", "vivace", "run", "--plan", "plan.toml", "--"]
    words = [*launcher, *run] if inside else [*run, sys.executable, *launcher]
    path = os.pathsep.join([str(SOURCE), str(SCRIPTS)])
    done = alone(sys.executable, *words, "train.py", cwd=tmp_path, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "runs/run/run.json").read_text())
    assert (told["processes"], told["problems"], told["tried"][0]["answer"]) == (2, [], "given"), done.stderr
    first, second = done.stdout.splitlines()
    assert first == second  # the same weights after as many steps under the plan
    assert int(first.split()[1]) > 0
    assert done.stderr.count("vivace: Page") == 1
    assert ("torchrun --nproc-per-node 2" in said(done)) == inside


def test_a_technique_that_cannot_act_on_a_script_is_refused_by_name(tmp_path):
    (tmp_path / "plan.toml").write_text("format = 1\n\n[techniques.loader_workers]\nnum_workers = 1\n")
    words = [sys.executable, str(SCRIPTS / "mnist.py"), "--epochs", "1", *SHORT]
    mine = vivace_run("--plan", "plan.toml", "--", *words, cwd=tmp_path, code=3)
    told = json.loads((tmp_path / "runs/run/run.json").read_text())
    assert told["plan"] == {}
    assert "loader_workers" in said(mine), mine.stderr


def test_a_script_that_asks_itself(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import vivace\nvivace.run_here(out='here')\n" + (SCRIPTS / "mnist.py").read_text())
    text = script.read_text().replace('"""In the manner', '__doc__ = """In the manner')
    script.write_text(text)
    path = os.pathsep.join([str(SOURCE), str(SCRIPTS)])
    done = alone(
        sys.executable, "-m", "train", "--epochs", "1", *LONG, cwd=tmp_path, PYTHONPATH=path, IMPATIENT="1"
    )
    assert done.returncode == 3, done.stderr
    told = json.loads((tmp_path / "here/run.json").read_text())
    assert told["outcome"] == "faster", done.stderr
    assert told["next"].startswith("vivace run --plan here/plan.toml -- python -m train --epochs 1")


def test_what_a_script_starts_leaves_its_run_here_alone(tmp_path):
    """A spawned process runs the script's first lines again, as a loader's workers may at each epoch."""
    (tmp_path / "train.py").write_text("""import multiprocessing
import pathlib
import vivace

vivace.run_here(out="here")


def listed():
    print(sorted(path.name for path in pathlib.Path("here").iterdir()))


if __name__ == "__main__":
    pathlib.Path("here/plan.toml").touch()
    child = multiprocessing.get_context("spawn").Process(target=listed)
    child.start()
    child.join()
""")
    done = alone(sys.executable, "train.py", cwd=tmp_path, PYTHONPATH=str(SOURCE))
    assert done.stdout == "['lock', 'plan.toml']\n", done.stderr
    assert said(done).count("no training step") == 1
    with take_lock(tmp_path / "here", "run"):
        second = alone(sys.executable, "train.py", cwd=tmp_path, PYTHONPATH=str(SOURCE))
    assert second.returncode == 1
    assert "another run is running in" in second.stderr
    assert (tmp_path / "here/plan.toml").exists()


def interrupted(*words, cwd):
    """Exit code and errors of a script that a Ctrl-C ends once it trains."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), str(SCRIPTS)])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    script = [sys.executable, str(SCRIPTS / "mnist.py"), "--epochs", "1000", *SHORT]
    process = subprocess.Popen([*words, *script], cwd=cwd, env=environment, text=True, **pipes)
    assert process.stdout is not None
    assert process.stdout.readline() == "epoch 0\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    return process.returncode, errors


def test_ctrl_c_ends_the_script_as_alone(tmp_path):
    """By the signal; alone by 1 where torch imports something at its end: Python forgets it then."""
    code, errors = interrupted(sys.executable, "-m", "vivace", "run", "--", cwd=tmp_path)
    assert code == -signal.SIGINT or code == interrupted(cwd=tmp_path)[0]
    assert code != 0
    assert "KeyboardInterrupt" in errors
    assert "vivace: " in errors


LISTENING = """
import signal
import time
for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, _: print(signal.Signals(number).name, flush=True))
print("listens", flush=True)
time.sleep(30)
"""


def test_signals_reach_a_script_that_the_launcher_waits_for(tmp_path):
    words = [sys.executable, "-m", "vivace", "run", "--json", "--", sys.executable, "-c", LISTENING]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(words, cwd=tmp_path, env=environment, text=True, **pipes)
    assert process.stderr is not None
    assert process.stderr.readline() == "listens\n"
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        process.send_signal(number)
        assert process.stderr.readline() == f"{number.name}\n"
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == json.loads(out)["exit_code"] == 128 + signal.SIGTERM


@pytest.mark.parametrize("late", ["None", "exec('1')"])
def test_what_is_run_at_the_end_does_not_hide_a_ctrl_c(tmp_path, late):
    program = f"""
import os, signal
from vivace.profiling.record.signals import end_as_interrupted
import atexit
atexit.register(end_as_interrupted)
atexit.register(lambda: {late})
os.kill(os.getpid(), signal.SIGINT)
"""
    (tmp_path / "ended.py").write_text(program)
    ended = alone(sys.executable, "ended.py", cwd=tmp_path, PYTHONPATH=str(SOURCE))
    assert ended.returncode == -signal.SIGINT
    assert ended.stderr.count("KeyboardInterrupt") == 1


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("import sys; sys.exit(5)", 5),
        ("import torch; raise SystemExit(0)", 0),
        ("import torch, os; os._exit(7)", 7),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("print(input())", 0),
    ],
)
def test_exit_codes_and_streams_are_the_scripts_own(tmp_path, program, code):
    done = vivace_run("--", sys.executable, "-c", program, cwd=tmp_path, source="a line\n", code=code)
    assert done.stdout == ("a line\n" if "input" in program else "")


def test_a_script_that_crashes_shows_the_traceback_that_it_has_alone(tmp_path):
    """Its own frames and torch's, also in its first steps, whose calls are looked at."""
    (tmp_path / "wrong.py").write_text("import torch\ntorch.nn.Linear(4, 1)(torch.ones(2, 3))\n")
    wanted = alone(sys.executable, "wrong.py", cwd=tmp_path).stderr
    assert "wrong.py" in wanted
    done = vivace_run("--", sys.executable, "wrong.py", cwd=tmp_path, code=1)
    assert done.stderr.startswith(wanted), done.stderr
    told = " ".join(line.removeprefix("vivace: ") for line in done.stderr.removeprefix(wanted).splitlines())
    assert told.endswith("it failed before its first training step had ended."), told
    (tmp_path / "wrong.py").write_text("import torch\nraise KeyboardInterrupt\n")
    interrupted = said(vivace_run("--", sys.executable, "wrong.py", cwd=tmp_path))
    assert interrupted.endswith("it was interrupted before its first training step had ended."), interrupted


def test_a_script_without_training_is_told_so(tmp_path):
    done = vivace_run("--", sys.executable, "-c", "import torch", cwd=tmp_path, code=0)
    told = " ".join(line.removeprefix("vivace: ") for line in done.stderr.splitlines())
    looked = r"took up to .* longer for being looked at, and "  # on a loaded machine
    assert re.fullmatch(rf"This run ({looked})?was left as it is: no training step of torch was seen\.", told)
    assert (
        vivace_run("--quiet", "--", sys.executable, "-c", "import torch", cwd=tmp_path, code=0).stderr == ""
    )


def test_what_a_search_needs_is_not_read_before_one_begins(tmp_path):
    program = (
        "import sys, torch\n"
        "early = {'vivace.plan', 'vivace.live.course', 'vivace.live.page', 'pydantic', 'jinja2'}\n"
        "sys.exit(' '.join(sorted(early & set(sys.modules))) or ('vivace.live.loop' not in sys.modules))\n"
    )
    vivace_run("--", sys.executable, "-c", program, cwd=tmp_path, code=0)


def test_the_launchers_own_time_is_handed_on_where_it_becomes_the_script(tmp_path):
    spent = {}
    for becoming in (True, False):
        _, environment, _, lock = prepared(
            [sys.executable, "a.py"], None, tmp_path / "run", becoming=becoming
        )
        lock.close()
        spent[becoming] = Errand.loads(environment[VARIABLE]).launch_seconds
    assert spent[True] > spent[False] == 0.0


def test_json_is_one_document(tmp_path):
    done = vivace_run(
        "--json", "--", sys.executable, "-c", "import torch; print('out')", cwd=tmp_path, code=0
    )
    assert json.loads(done.stdout)["outcome"] == "nothing_seen"
    assert "out" in done.stderr


def test_of_ranks_one_prints_the_document(tmp_path):
    for rank in ("1", "0"):
        done = vivace_run("--json", "--", "true", cwd=tmp_path, environment={"RANK": rank}, code=0)
        assert bool(done.stdout) == (rank == "0")


def test_bad_input_is_one_sentence(tmp_path):
    for words, text in (
        (["--", "no-such-program"], "no-such-program"),
        (["--plan", "nothing.toml", "--", sys.executable, "x.py"], "no plan file 'nothing.toml'"),
    ):
        done = vivace_run(*words, cwd=tmp_path, code=2)
        assert text in done.stderr
        assert len(done.stderr.splitlines()) == 1
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("")
    with pytest.raises(FolderError, match=r"mine\.txt"):
        vivace.run([sys.executable], out=tmp_path / "full")
    (tmp_path / "full/mine.txt").rename(tmp_path / "full/plan.toml")  # of no run, which leaves a lock
    with pytest.raises(FolderError, match=r"plan\.toml"):
        vivace.run([sys.executable], out=tmp_path / "full")
    assert (tmp_path / "full/plan.toml").exists()
    with pytest.raises(InputError, match=r"python train\.py"):
        vivace.run([], out=tmp_path / "new")
    with pytest.raises(PlanError):
        vivace.run([sys.executable], tmp_path / "none.toml", out=tmp_path / "new")


EARLIER = {
    "plan.toml": "format = 1\n\n[techniques.fused_optimizer]\n",
    "ledger.jsonl": "{}\n",
    "run.json": '{"plan": {"fused_optimizer": {}}, "process": 0}',
    "run.html": "of the earlier run",
}
FEW_STEPS = """
import torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    model(torch.randn(2, 4)).mean().backward()
    optimizer.step()
"""


def lying_in(folder):
    return {file.name: file.read_text() for file in folder.iterdir() if file.name != "lock"}


@pytest.mark.parametrize("program", ["", "import torch; raise SystemExit('no data')"])
def test_what_never_trains_costs_no_earlier_run(tmp_path, program):
    """As a mistyped command does; also one with another plan."""
    folder, other = tmp_path / "runs/run", tmp_path / "other.toml"
    folder.mkdir(parents=True)
    for name, text in EARLIER.items():
        (folder / name).write_text(text)
    other.write_text("format = 1\n\n[techniques.channels_last]\n")
    words = ("-c", program) if program else ("nothere.py",)
    for options in ([], ["--plan", str(other), "--json"]):
        done = vivace_run(*options, "--", sys.executable, *words, cwd=tmp_path)
        assert lying_in(folder) == EARLIER
    told = json.loads(done.stdout)
    assert (told["outcome"], told["plan_path"]) == ("nothing_seen", None)
    assert not program or told["reason"].endswith("; an earlier result stays in runs/run")
    asking = f"import vivace; vivace.run_here(); {program}"
    asks = alone(sys.executable, "-c", asking, cwd=tmp_path, PYTHONPATH=str(SOURCE))
    assert "an earlier result stays" in said(asks)
    assert lying_in(folder) == EARLIER


def test_one_that_trains_replaces_an_earlier_run(tmp_path):
    folder, other = tmp_path / "runs/run", tmp_path / "other.toml"
    folder.mkdir(parents=True)
    other.write_text("format = 1\n\n[techniques.channels_last]\n")
    for options in ([], ["--plan", str(other)]):
        for name, text in EARLIER.items():
            (folder / name).write_text(text)
        vivace_run(*options, "--", sys.executable, "-c", FEW_STEPS, cwd=tmp_path, code=0)
        found = lying_in(folder)
        assert json.loads(found["run.json"])["steps"] > 0
        assert ("channels_last" in found.get("plan.toml", "")) is bool(options)
        assert "fused_optimizer" not in found.get("plan.toml", "")
        assert found.get("ledger.jsonl") != EARLIER["ledger.jsonl"]
        assert found.get("run.html") != EARLIER["run.html"]


def test_a_run_that_is_killed_leaves_no_other_ones_plan(tmp_path):
    folder = tmp_path / "runs/run"
    folder.mkdir(parents=True)
    for name, text in EARLIER.items():
        (folder / name).write_text(text)
    program = FEW_STEPS + "import os; os._exit(9)"
    vivace_run("--", sys.executable, "-c", program, cwd=tmp_path, code=9)
    assert lying_in(folder) == {}


def test_a_given_plan_outlives_a_run_that_never_gets_to_it(tmp_path):
    """Also where it lies in the folder of an earlier run."""
    folder = tmp_path / "runs" / "run"
    folder.mkdir(parents=True)
    (folder / "plan.toml").write_text("format = 1\n\n[techniques.fused_optimizer]\n")
    (folder / "ledger.jsonl").write_text("{}\n")
    for _ in range(2):
        words = ("--plan", "runs/run/plan.toml", "--json", "--", sys.executable, "-c", "import torch")
        told = json.loads(vivace_run(*words, cwd=tmp_path, code=0).stdout)
        assert told["plan_path"] is None  # nothing acted
        assert vivace.Plan.load(folder / "plan.toml").names == ("fused_optimizer",)


def test_a_script_may_clear_its_runs(tmp_path):
    """And the lock of its own run with them."""
    for line in ("shutil.rmtree('runs/run')", *2 * ("pathlib.Path('runs/run/lock').unlink()",)):
        (tmp_path / "clears.py").write_text(f"import pathlib, shutil, torch\n{line}\n")
        vivace_run("--", sys.executable, "clears.py", cwd=tmp_path, code=0)


def test_processes_that_a_script_starts_train_as_they_are(tmp_path):
    script = tmp_path / "spawns.py"
    script.write_text(
        "import torch\nimport torch.multiprocessing as mp\n\n"
        "def train():\n"
        "    model = torch.nn.Linear(4, 2)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    for _ in range(5):\n"
        "        model(torch.randn(2, 4)).mean().backward()\n"
        "        optimizer.step()\n\n"
        "if __name__ == '__main__':\n"
        "    child = mp.get_context('spawn').Process(target=train)\n"
        "    child.start()\n"
        "    child.join()\n"
        "    raise SystemExit(child.exitcode)\n"
    )
    done = vivace_run("--", sys.executable, str(script), cwd=tmp_path, code=0)
    assert "it trains in processes that it starts itself" in said(done)


def test_a_launcher_that_never_trains_leaves_its_childs_result(tmp_path):
    """As `accelerate launch` does: torch is imported there, and the child trains."""
    child = [str(SCRIPTS / "mnist.py"), "--epochs", "1", *SHORT]
    program = f"import subprocess, sys, torch\nsubprocess.run([sys.executable, *{child!r}], check=False)\n"
    (tmp_path / "launch.py").write_text(program)
    for options in ([], ["--json"]):
        done = vivace_run(*options, "--", sys.executable, "launch.py", cwd=tmp_path)
        told = json.loads((tmp_path / "runs/run/run.json").read_text())
        assert told["steps"] > 0, done.stderr
        assert "no training step" not in said(done)


@pytest.mark.parametrize("imports", ["", "import torch\n"])
def test_what_a_script_reads_of_its_childs_errors_is_the_childs_own(tmp_path, imports):
    """Such as a driver with a process for each fold."""
    child = [str(SCRIPTS / "mnist.py"), "--epochs", "1", *SHORT]
    program = f"import subprocess, sys\n{imports}child = [sys.executable, *{child!r}]\n"
    program += "print(subprocess.run(child, capture_output=True, text=True).stderr)\n"
    (tmp_path / "driver.py").write_text(program)
    done = vivace_run("--", sys.executable, "driver.py", cwd=tmp_path, code=0)
    assert "vivace" not in done.stdout
    assert said(done).count("was left as it is: its steps took") == 1


def test_a_process_that_a_script_starts_says_nothing(tmp_path):
    program = (
        "import subprocess, sys, torch\nsubprocess.run([sys.executable, '-c', 'import torch'], check=True)\n"
    )
    done = vivace_run("--", sys.executable, "-c", program, cwd=tmp_path)
    assert said(done).count("no training step") == 1


def test_a_folder_in_which_a_script_runs_is_refused(tmp_path):
    (tmp_path / "runs/run").mkdir(parents=True)
    with take_lock(tmp_path / "runs/run", "run"):
        done = vivace_run("--", sys.executable, "-c", "pass", cwd=tmp_path, code=2)
    assert "another run is running in" in done.stderr
    vivace_run("--", sys.executable, "-c", "pass", cwd=tmp_path, code=0)


def test_what_a_script_leaves_running_does_not_keep_its_folder(tmp_path):
    program = "import os, torch\nos.system('sleep 20 > /dev/null 2>&1 &')\n"
    vivace_run("--", sys.executable, "-c", program, cwd=tmp_path, code=0)
    with take_lock(tmp_path / "runs/run", "run"):
        pass


def test_importing_torch_is_no_time_of_ours(tmp_path):
    """A script that asks in its first line imports it anyway; counted, it would put off the search."""
    program = """import sys
import types
import vivace
from vivace.live import here

clock = here.time.perf_counter
here.time = types.SimpleNamespace(perf_counter=lambda: print("torch" in sys.modules) or clock())
vivace.run_here()
"""
    done = alone(sys.executable, "-c", program, cwd=tmp_path, PYTHONPATH=str(SOURCE))
    assert done.stdout == "True\nTrue\n", done.stderr


def test_the_variable_of_the_launcher_keeps_run_here_out(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, "{}")
    vivace.run_here(out=tmp_path / "never")
    assert not (tmp_path / "never").exists()
