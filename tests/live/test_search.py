"""`vivace tune -- python train.py`: a plan, and not a byte of the script's in anybody's folders."""

import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

import vivace
from vivace.errors import FolderError, InputError
from vivace.files import take_lock
from vivace.live import course, cover
from vivace.live import loop as loop_module
from vivace.live.answering import searched as answer_of
from vivace.live.ending import end_at_once, tell
from vivace.live.errand import Errand
from vivace.live.loop import Loop
from vivace.live.search import _searched, search

SCRIPTS = Path(__file__).parent / "scripts"
SOURCE = Path(vivace.__file__).parents[1]
TRAINING = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
import torch
from slow import Slow
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
# No ReLU: of so few numbers one that rounding turns over is seen, and a compiled plan's step is judged once.
model = nn.Sequential(Slow(0.1), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100000):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
"""
WRITING = """
import os, pathlib, shutil, tempfile
pathlib.Path("kept.txt").write_text("changed")
pathlib.Path("gone.txt").unlink()
shutil.move("old", "new")
os.rename("new/a.txt", "moved.txt")
shutil.rmtree("full")
os.makedirs("runs/checkpoints")
pathlib.Path("runs/checkpoints/model.pt").write_bytes(b"x" * 100_000)
pathlib.Path(os.environ["ELSEWHERE"], "cache.bin").write_bytes(b"x")
assert pathlib.Path("kept.txt").read_text() == "changed"
assert not pathlib.Path("gone.txt").exists()
assert sorted(os.listdir(".")).count("new") == 1
tempfile.mkstemp(prefix="of-the-script-")
"""


def possible(way, tmp_path):
    """Has this system this way of keeping a script from writing?"""
    tmp_path.mkdir(exist_ok=True)
    words = [sys.executable, "-I", cover.__file__, str(tmp_path), str(tmp_path), way, "--", "true"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


@pytest.fixture
def folders(tmp_path):
    """A project to work in, a folder elsewhere, and a place for results, which is neither."""
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    for folder in (project / "old", project / "full" / "inner", elsewhere):
        folder.mkdir(parents=True)
    for name in ("kept.txt", "gone.txt", "old/a.txt", "full/inner/b.txt"):
        (project / name).write_text(name)
    return project, elsewhere


def tree(*folders):
    """Every file and folder below, with what it holds and when it was changed."""
    found = {}
    for folder in folders:
        for path in sorted([folder, *folder.rglob("*")]):
            held = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
            found[str(path)] = held, path.stat().st_mtime_ns, path.stat().st_mode
    return found


def searched(monkeypatch, project, elsewhere, program, out, **options):
    (project / "train.py").write_text(program)
    before = tree(project, elsewhere)
    monkeypatch.chdir(project)
    monkeypatch.setenv("ELSEWHERE", str(elsewhere))
    result = search([sys.executable, "train.py"], out=out, **options)
    assert tree(project, elsewhere) == before
    return result


def test_a_plan_is_found_and_nothing_is_kept_of_what_the_script_wrote(folders, tmp_path, monkeypatch):
    if not possible(cover.OVERLAY, tmp_path / "try"):
        pytest.skip("no overlays in a mount namespace here")
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr("vivace.live.search.DISK", tmp_path / "disk")
    result = searched(monkeypatch, *folders, WRITING + TRAINING, tmp_path / "out", budget_seconds=60.0)
    told = result.to_dict()
    assert told["outcome"] == "faster", (told["reason"], (tmp_path / "out/script.txt").read_text())
    assert told["trials"]
    assert told["plan"]
    assert told["promise"] == "rounding"
    assert vivace.Plan.load(tmp_path / "out/plan.toml").names == tuple(told["plan"])
    assert told["steps"] < 1000
    assert result.exit_code == 0
    assert answer_of(told, "python train.py").next[0].startswith("vivace run --plan")
    assert list((tmp_path / "disk").iterdir()) == []


def test_results_may_lie_inside_of_what_is_covered(folders, tmp_path, monkeypatch):
    if not possible(cover.OVERLAY, tmp_path / "try"):
        pytest.skip("no overlays in a mount namespace here")
    project, _ = folders
    monkeypatch.chdir(project)
    (project / "train.py").write_text(
        "import torch\nopen('runs/tune/of-the-script', 'w')\nopen('more', 'w')\n"
    )
    result = search([sys.executable, "train.py"])
    assert result.to_dict()["outcome"] == "nothing_tried"
    assert result.exit_code == 1
    assert not (project / "more").exists()
    assert (project / "runs/tune/run.json").is_file()


def test_where_there_is_no_overlay_a_script_is_stopped_at_its_first_write(folders, tmp_path, monkeypatch):
    if not possible(cover.READ_ONLY, tmp_path / "try"):
        pytest.skip("no Landlock here")
    program = "import torch\nopen('new.txt', 'w')"
    told = searched(monkeypatch, *folders, program, tmp_path / "out", ways=[cover.READ_ONLY]).to_dict()
    assert told["outcome"] == "nothing_tried"
    assert "stopped at its first write, to 'new.txt'" in told["reason"]
    assert told["script_exit_code"] == 1


def test_data_in_shared_memory_are_read_and_stay_as_they_are(tmp_path):
    if not possible(cover.OVERLAY, tmp_path / "try"):
        pytest.skip("this machine allows no overlay")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as data:
        inner = Path(data) / "inner"
        inner.mkdir()
        for place in (Path(data), inner):
            (place / "data.txt").write_text("kept\n")
        (tmp_path / "results").mkdir()
        words = [sys.executable, "-I", cover.__file__, str(tmp_path / "scratch"), str(tmp_path / "results")]
        program = (
            "cat data.txt inner/data.txt && echo more >> inner/data.txt && cat inner/data.txt; rm -r inner"
        )
        done = subprocess.run(
            [*words, cover.OVERLAY, "--", "sh", "-c", program], cwd=data, capture_output=True, text=True
        )
        assert done.stdout.split() == ["kept", "kept", "kept", "more"], done.stderr
        assert (inner / "data.txt").read_text() == "kept\n"


@pytest.mark.parametrize("way", [cover.OVERLAY, cover.READ_ONLY])
@pytest.mark.parametrize(
    "command", ["echo x > kept.txt", "rm kept.txt", "mkdir new", "mv kept.txt full", "truncate -s 0 kept.txt"]
)
def test_whatever_is_written_the_folders_are_as_before(folders, tmp_path, way, command):
    if not possible(way, tmp_path / "try"):
        pytest.skip(f"no {way} here")
    before = tree(*folders)
    for name in ("scratch", "results"):
        (tmp_path / name).mkdir()
    program = f"{command}; code=$?; echo seen > '{tmp_path}/results/out.txt'; exit $code"
    words = [sys.executable, "-I", cover.__file__, str(tmp_path / "scratch"), str(tmp_path / "results"), way]
    done = subprocess.run(
        [*words, "--", "sh", "-c", program], cwd=folders[0], capture_output=True, check=False
    )
    assert (done.returncode == 0) == (way == cover.OVERLAY), done.stderr
    assert tree(*folders) == before
    assert (tmp_path / "results/out.txt").read_text() == "seen\n"


def test_mounts_of_other_kinds_are_seen_and_stay_as_they_are(folders, tmp_path):
    inside = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    mounted = f"mount -t ramfs none '{folders[1]}' && echo real > '{folders[1]}/data.txt'"
    able = shutil.which("unshare") and subprocess.run([*inside, mounted], check=False).returncode == 0
    if not able or not possible(cover.OVERLAY, tmp_path / "try"):
        pytest.skip("no mount namespaces here")
    for name in ("scratch", "results"):
        (tmp_path / name).mkdir()
    program = f"cat '{folders[1]}/data.txt'; echo x > '{folders[1]}/data.txt'; echo done"
    places = [str(tmp_path / name) for name in ("scratch", "results")]
    words = [sys.executable, "-I", cover.__file__, *places, cover.OVERLAY]
    covered = shlex.join([*words, "--", "sh", "-c", program])
    done = subprocess.run(
        [*inside, f"{mounted} && {covered}; cat '{folders[1]}/data.txt'"],
        cwd=folders[0],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["real", "done", "real"], done.stderr


def test_a_script_that_writes_nothing_before_the_plan_needs_no_overlay(folders, tmp_path, monkeypatch):
    if not possible(cover.READ_ONLY, tmp_path / "try"):
        pytest.skip("no Landlock here")
    result = searched(
        monkeypatch, *folders, TRAINING, tmp_path / "out", budget_seconds=60.0, ways=[cover.READ_ONLY]
    )
    assert result.to_dict()["outcome"] == "faster", result.to_dict()["reason"]


def test_where_there_is_neither_it_is_not_run(folders, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="vivace run -- "):
        searched(monkeypatch, *folders, "open('new.txt', 'w')", tmp_path / "out", ways=[])


def test_a_script_that_does_not_end_is_ended(folders, tmp_path, monkeypatch):
    ways = [way for way in (cover.OVERLAY, cover.READ_ONLY) if possible(way, tmp_path / way)]
    if not ways:
        pytest.skip("nothing keeps a script from writing here")
    monkeypatch.setattr("vivace.live.search.LATE_SECONDS", (0.0, 0.0))
    program = "import time\ntime.sleep(1000)"
    result = searched(monkeypatch, *folders, program, tmp_path / "out", budget_seconds=2.0)
    assert result.to_dict()["script_exit_code"] != 0
    assert result.exit_code == 1


def test_a_request_to_end_reaches_the_script(folders, tmp_path, monkeypatch):
    ways = [way for way in (cover.OVERLAY, cover.READ_ONLY) if possible(way, tmp_path / way)]
    if not ways:
        pytest.skip("nothing keeps a script from writing here")
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(True))
    try:
        program = f"import os, signal, time\nos.kill({os.getpid()}, signal.SIGTERM)\ntime.sleep(60)"
        told = searched(monkeypatch, *folders, program, tmp_path / "out", budget_seconds=30.0).to_dict()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told["script_exit_code"] == -signal.SIGTERM
    assert heard


def test_the_command_line(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}

    def tune(*words):
        return subprocess.run(
            [sys.executable, "-m", "vivace", "tune", *words],
            cwd=tmp_path,
            env=environment,
            input="mine\n",
            capture_output=True,
            text=True,
            check=False,
        )

    done = tune("--memory", "2GiB", "--", sys.executable, "train.py")
    assert done.returncode == 2
    assert "--memory needs a JOB" in done.stderr
    done = tune("--steps", "5", "--details", "--", sys.executable, "train.py")
    assert done.returncode == 2
    assert "--steps" in done.stderr
    done = tune("--json", "--", sys.executable, "-c", "print(input()); open('x', 'w')")
    assert done.returncode in (1, 2)
    if done.returncode == 1:
        assert json.loads(done.stdout)["outcome"] == "nothing_tried"
        assert not (tmp_path / "x").exists()
        assert (tmp_path / "runs/tune/script.txt").read_text().startswith("mine")


def test_a_fault_of_ours_ends_a_script_that_is_run_for_its_plan_alone(tmp_path, monkeypatch):
    def broken(*_):
        raise KeyError("ours")

    monkeypatch.setattr(course.Course, "_search", broken)
    monkeypatch.setattr(loop_module, "SMALLEST_STEP_SECONDS", 0.0)
    loop = Loop(Errand(str(tmp_path), "runs/tune", "python train.py", search_seconds=60.0), tell=tell)
    ended = []
    assert loop.end is end_at_once
    loop.end = lambda: ended.append(json.loads((tmp_path / "run.json").read_text())["reason"])
    model = torch.nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop.install()
    try:
        for _ in range(60):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
    finally:
        loop.finish()
    assert ended == ["a fault of Vivace's own, KeyError: 'ours'"]


def test_what_was_only_refused_is_no_measurement(tmp_path):
    found = {"plan": {}, "reason": "because", "tried": [{"plan": {"a": {}}, "answer": "cannot"}]}
    told = _searched(found, tmp_path, Path("runs/tune"), "python a.py", 0).to_dict()
    assert told["outcome"] == "nothing_tried"
    assert told["trials"] == [
        {"techniques": ["a"], "status": "refused", "reason": "cannot", "ratio": None, "beside": []}
    ]
    assert answer_of(told, "python a.py").title == "No plan: because"


def test_a_script_in_a_long_step_is_asked_to_say_what_it_found(folders, tmp_path, monkeypatch):
    """Python says nothing at its end after SIGTERM; after Ctrl-C it does."""
    ways = [way for way in (cover.OVERLAY, cover.READ_ONLY) if possible(way, tmp_path / way)]
    if not ways:
        pytest.skip("nothing keeps a script from writing here")
    late = TRAINING.replace(
        "    optimizer.step()",
        "    optimizer.step()\n    if step == 3:\n        import time; print('it', 'sleeps', flush=True)\n"
        "        time.sleep(1000)",
    )
    begun = subprocess.Popen

    class Patient(begun):
        """Its time is over once the script is in its long step, however long it took to get there."""

        def wait(self, timeout=None):
            if timeout != 120.0:  # the budget, and as long again
                return super().wait(timeout)
            while "it sleeps" not in (tmp_path / "out" / "script.txt").read_text():
                assert self.poll() is None
                time.sleep(0.05)
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr("vivace.live.search.subprocess.Popen", Patient)
    told = searched(monkeypatch, *folders, late, tmp_path / "out", ways=ways, budget_seconds=60.0).to_dict()
    assert told["steps"] >= 3
    assert "no training step" not in told["reason"]


def test_what_was_kept_and_hopeless_broke_no_promise(tmp_path):
    verdict = {"kept": True, "reason": ""}
    found = {
        "plan": {},
        "reason": "b",
        "tried": [{"plan": {"a": {}}, "answer": "much slower", "verdict": verdict}],
    }
    told = _searched(found, tmp_path, Path("runs/tune"), "python a.py", 0).to_dict()
    assert told["outcome"] == "nothing_helps"


def test_a_plan_that_no_search_wrote_stays(tmp_path):
    (tmp_path / "plan.toml").write_text("format = 1\n")
    with pytest.raises(FolderError, match=r"is not empty \(plan\.toml\): name another with --out"):
        search([sys.executable, "-c", "pass"], out=tmp_path)
    assert (tmp_path / "plan.toml").read_text() == "format = 1\n"


SHORT_TRAINING = """
import torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    model(torch.randn(2, 4)).mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("words", [["nothere.py"], ["-c", SHORT_TRAINING]])
def test_a_search_that_tries_nothing_costs_no_earlier_one(tmp_path, words):
    earlier = {"plan.toml": "format = 1\n", "run.json": '{"plan": {"a": {}}}', "run.html": "its page"}
    out = tmp_path / "out"
    out.mkdir()
    for name, text in {**earlier, "lock": "", "ledger.jsonl": "{}\n"}.items():
        (out / name).write_text(text)
    told = search([sys.executable, *words], out=out, ways=(cover.READ_ONLY, cover.OVERLAY)).to_dict()
    assert (told["outcome"], told["plan"], told["report_path"]) == ("nothing_tried", {}, None)
    assert {name: (out / name).read_text() for name in earlier} == earlier
    assert {file.name for file in out.iterdir()} == {*earlier, "lock", "ledger.jsonl", "script.txt"}
    assert words == ["nothere.py"] or f"an earlier result stays in {out}" in told["reason"]


def test_a_folder_in_which_a_search_runs_is_refused(tmp_path):
    with take_lock(tmp_path, "search"), pytest.raises(FolderError, match="another search is running"):
        search([sys.executable, "-c", "pass"], out=tmp_path)
