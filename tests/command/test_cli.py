"""The command line: one sentence for every bad input, one document on standard output, and exit codes."""

import dataclasses
import io
import json
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from rich.console import Console

from vivace import recipes
from vivace.command import cli
from vivace.command.models import require_processor
from vivace.command.options import draw_rows
from vivace.errors import InputError
from vivace.recipes import RECIPES

SCENES = Path(__file__).parents[1] / "scenes"
JOBS = SCENES / "jobs_with_faults.py"
COMMANDS = (
    "compare",
    "inspect",
    "profile",
    "run",
    "tune",
    "train",
    "demo",
    "verify",
    "report",
    "recipes",
    "techniques",
    "export",
    "compress",
    "sweep",
)

NO_TORCH = """
import importlib.metadata as metadata
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is blocked")

sys.meta_path.insert(0, Blocker())
found = metadata.version
metadata.version = lambda name: {version!r} if name == "torch" else found(name)
"""


@dataclasses.dataclass
class Done:
    code: int
    output: str
    errors: str

    @property
    def document(self):
        return json.loads(self.output)

    @property
    def sentence(self):
        """The one line on standard error that begins with the program's name."""
        assert "Traceback" not in self.errors, self.errors
        found = [line.rpartition("vivace: ")[2] for line in self.errors.splitlines() if "vivace: " in line]
        assert len(found) == 1, self.errors
        return found[0]


def run(*arguments, folder=None, environment=None):
    """A real process, for what needs no torch."""
    command = [sys.executable, "-m", "vivace", *arguments]
    environment = {**os.environ, **(environment or {})}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


@dataclasses.dataclass
class Command:
    """A command in a child process that has torch already."""

    process: multiprocessing.Process
    folder: Path

    def wait(self):
        self.process.join(100)
        assert self.process.exitcode is not None, "the command hangs"
        output, errors = ((self.folder / name).read_text() for name in ("standard-output", "standard-error"))
        return Done(self.process.exitcode, output, errors)


@pytest.fixture
def begin(start_scene, tmp_path):
    """``(arguments...) -> Command``; JOBS is the file of faulty jobs."""
    begun = []

    def call(*arguments, **environment):
        scene = {
            "arguments": [argument.replace("JOBS", str(JOBS)) for argument in arguments],
            "folder": str(tmp_path),
            "environment": environment,
            "written": [str(tmp_path / "standard-output"), str(tmp_path / "standard-error")],
        }
        begun.append(start_scene(SCENES / "command.py", SCENE=scene))
        return Command(begun[-1], tmp_path)

    yield call
    for child in begun:
        child.kill()
        child.join()


@pytest.fixture
def vivace(begin):
    """``(arguments...) -> Done``."""
    return lambda *arguments, **environment: begin(*arguments, **environment).wait()


@pytest.fixture
def plans(tmp_path):
    """Plan files with one fault each, beside an empty plan."""
    texts = {
        "empty": "format = 1\n",
        "version": "format = 9\n",
        "unknown": "format = 1\n\n[techniques.bf16_autocost]\n",
        "setting": "format = 1\n\n[techniques.micro_batches]\nnum = 1\n",
        "torn": "format = 1\n[techniques.micro",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.toml").write_text(text)


def test_help_is_quick_and_imports_no_torch():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run("--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.code == 0
    assert all(command in done.output for command in COMMANDS)
    assert "..." not in done.output.partition("Commands:")[2], "a first sentence is too long for 80 columns"
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime <= 0.5
    code = "import sys, vivace.command.cli; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bogus"], "No such command 'bogus'"),
        (["tune"], "Missing argument 'JOB | -- COMMAND'"),
        (["verify", "digits"], "needs either a plan"),
        (["tune", "digits", "--bogus"], "No such option: --bogus"),
        (["train", "digits", "--seed", "x"], "--seed is 'x'; it must be a whole number"),
        (["advise", "digits", "--budget-usd=free"], "--budget-usd is 'free'; it must be a number"),
        (["report", "nowhere"], "there is no folder 'nowhere'"),
        (["run", "plain.py"], "'plain.py' needs its interpreter: -- python plain.py"),
        (["plain.py"], "'plain.py' is no command: vivace run -- python plain.py for a script"),
        (["plain.py:job"], "vivace tune plain.py:job for a Job"),
        ([f"{'a' * 300}.py"], "No such command 'aaa"),
        (
            ["run", "python", "plain.py", "--epochs", "3"],
            "vivace run has no option --epochs; what is a script's stands behind --: "
            "vivace run --json -- python plain.py --epochs 3",
        ),
        (["profile", "--out", "p", "plain.py", "-x"], "profile --json --out p -- python plain.py -x"),
    ],
)
def test_usage_is_one_sentence_and_one_document(arguments, message, tmp_path):
    (tmp_path / "plain.py").write_text("raise RuntimeError('run blindly')\n")
    done = run(*arguments[:1], "--json", *arguments[1:], folder=tmp_path)
    assert done.code == 2
    assert message in done.sentence
    assert done.errors.count("\n") == 1
    assert done.document["error"]["message"] == done.sentence
    assert [path.name for path in tmp_path.iterdir()] == ["plain.py"]


def test_no_command_shows_the_help():
    done = run()
    assert done.code == 2
    assert "Commands:" in done.errors
    assert done.output == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "digits"),
        ("tune", "digits"),
        ("compress", "digits", "--run", "runs/train"),
        ("sweep", "job.py:job", "lr=1e-4..1e-1:log"),
        ("demo",),
    ],
)
@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("2.5.1+cu121", "torch 2.5.1+cu121 is too old; Vivace needs torch >= 2.11"),
        (None, "torch is not installed"),
    ],
)
def test_an_old_torch_is_named_before_it_is_imported(arguments, version, message, tmp_path):
    text = NO_TORCH.format(version=version)
    if version is None:
        text += (
            "\ndef gone(name):\n    raise metadata.PackageNotFoundError(name)\n\nmetadata.version = gone\n"
        )
    (tmp_path / "sitecustomize.py").write_text(text)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = run(*arguments, "--json", folder=tmp_path, environment={"PYTHONPATH": path})
    assert done.code == 2
    assert message in done.sentence
    assert done.document["error"]["kind"] == "InputError"
    assert not (tmp_path / "runs").exists()


def test_inspect_prints_the_contract():
    done = run("inspect", "--json")
    assert done.code == 0
    assert {"devices", "versions", "limits", "ceilings"} <= set(done.document)
    assert done.document["devices"][0]["name"]
    assert "python" in done.document["versions"]
    quiet = run("inspect", "--quiet")
    assert (quiet.code, quiet.output, quiet.errors) == (0, "", "")


def test_techniques_lists_the_cards():
    done = run("techniques", "--json", "--quiet")
    assert done.code == 0
    assert done.errors == ""
    cards = {card["name"]: card for card in done.document["techniques"]}
    assert {"bf16_autocast", "channels_last", "compile"} <= set(cards)
    assert cards["host_allocator"]["promise"] == "exact"
    table = run("techniques")
    assert table.output == ""
    assert all(name in table.errors for name in cards)
    one = run("techniques", "micro_batches", "--json").document
    assert one["name"] == "micro_batches"
    assert "num = 2" in one["settings"]
    assert one["what it does"]


def test_an_address_is_told_to_its_end():
    file, address = io.StringIO(), f"https://a.example/{'far/' * 30}"
    draw_rows((), [["source", address]], Console(file=file, width=80))
    assert "".join(file.getvalue().split()) == f"source{address}"


def test_recipes_are_listed_and_can_be_loaded():
    found = run("recipes", "--json").document["recipes"]
    assert {row["recipe"] for row in found} == set(RECIPES)
    assert all(row["task"] and row["data"] and row["metric"] for row in found)
    assert all(row["minutes"] > 0 and row["margin"] > 0 for row in found)
    one = run("recipes", "detection", "--json").document
    assert one == next(row for row in found if row["recipe"] == "detection")
    assert (
        "pip install 'vivace[tasks]' && apt install fonts-noto-color-emoji"
        in run("recipes", "detection").errors
    )
    assert "there is no recipe 'detectoin'; did you mean 'detection'?" in run("recipes", "detectoin").errors
    files = {path.stem for path in Path(recipes.__file__).parent.glob("*.py")} - {"__init__", "showing"}
    assert files == set(RECIPES)


def test_version_is_the_packages():
    assert run("--version").output == f"vivace {version('vivace')}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train nowhere.py:job", "there is no file 'nowhere.py'"),
        pytest.param(f"train {300 * 'a'}.py:job", "there is no file 'aaa", id="a name too long"),
        ("train JOBS:goo", "has no name 'goo'; did you mean 'good'?"),
        ("train JOBS", ": write {JOBS}:"),
        ("tune script.py", "'script.py' is a script without a Job: vivace run -- python script.py"),
        ("tune script.py", "vivace tune -- python script.py finds a plan on its steps"),
        ("tune notes.ipynb", "'notes.ipynb' is a notebook: call vivace.tune(job) in it"),
        ("tune script", "there is no recipe 'script'; for the file write script.py:job"),
        ("tune two.py", "'two.py' holds small and large: write two.py:large"),
        ("tune two.py:job --device cuda:7", "there is no device cuda:7 here: this machine shows cpu"),
        ("compress two.py:job --run r --device cuda:7", "there is no device cuda:7 here"),
        ("export r --to onnx --device cuda", "there is no device cuda here"),
        ("train JOBS:good --deadline 12", "--deadline is '12'; it must be a time such as 90s, 30m or 2h"),
        ("train two.py:job --device mps", "the device is 'mps'; Vivace trains on cpu, cuda"),
        ("techniques bf16_autocost", "unknown technique 'bf16_autocost'; did you mean 'bf16_autocast'?"),
        ("train JOBS:text", "'text' in '{JOBS}' is of type str; it must be a vivace.Job or return one"),
        ("train syntax.py:job", "syntax.py, line 2: '(' was never closed: x = (1 +"),
        ("train syntax.py", "syntax.py, line 2: '(' was never closed: x = (1 +"),
        (
            "compress two.py:job --run r --margin 200%",
            "the margin is '200%'; a share of the metric must be below",
        ),
        ("train leaving.py:job", "leaving.py, line 1: raise SystemExit(0)"),
        ("train digitz", "there is no recipe 'digitz'; did you mean 'digits'?"),
        ("train JOBS:good --plan version.toml", "version.toml has format 9; this Vivace reads format 1"),
        (
            "train JOBS:good --plan unknown.toml",
            "unknown technique 'bf16_autocost'; did you mean 'bf16_autocast'?",
        ),
        ("train JOBS:good --plan setting.toml", "setting.toml, line 4: 'micro_batches' cannot have num = 1"),
        ("train JOBS:good --plan torn.toml", "torn.toml is not valid TOML"),
        ("train JOBS:good --plan missing.toml", "there is no plan file 'missing.toml'"),
        ("train JOBS:good --max-steps 0", "max_steps must be more than 0, not 0"),
        ("train JOBS:good --on-broken cry", "on_broken is one of stop, fallback, ignore, not 'cry'"),
        ("verify JOBS:goo --plan empty.toml", "has no name 'goo'; did you mean 'good'?"),
        ("verify JOBS:good --plan version.toml", "version.toml has format 9"),
        ("tune JOBS:good --budget quick", "the budget is 'quick'; it must be fast, balanced, max"),
        ("tune JOBS:good --memory lots", "the memory budget is 'lots'; write a size such as 20GiB"),
        ("tune JOBS:good --allow all", "allow is 'all'; it must be exact, rounding or semantics"),
        ("tune JOBS:nan --budget 20", "the Job's loss is nan at step 0"),
        (
            "train JOBS:vector_loss",
            "the loss has the shape (8,); it must be one number, the mean over the batch",
        ),
        ("train JOBS:no_loss", "the loss is NoneType; it must be a tensor"),
        ("train JOBS:float_loss", "the loss is float; it must be a tensor"),
        ("train JOBS:silent_step", "the Job's step returned None; it must return its loss"),
        ("train JOBS:two_losses", "the Job's loss has the shape (2,); it must be one number"),
        ("train JOBS:empty", "the Job's data() gave no batch"),
        ("train JOBS:raising", "step 1 of the training failed: ZeroDivisionError"),
        ("train JOBS:quits", "the Job's model failed: SystemExit: 0"),
        ("train JOBS:quits_in_loss", "step 1 of the training failed: SystemExit: 0"),
        ("train JOBS:leaves_at_once", "the job ended the process by os._exit(0) before the command was done"),
        ("train JOBS:asks", "standard input is closed while Vivace runs a job; the job must not read it"),
        ("train JOBS:asked", "standard input is closed while Vivace runs a job; the job must not read it"),
        ("train JOBS:no_module", "the Job's model() returned a str; it must return an nn.Module"),
        ("train JOBS:no_optimizer", "optimizer(model) returned NoneType, not a torch.optim.Optimizer"),
        ("train JOBS:foreign_optimizer", "holds none of the model's parameters, so nothing would be trained"),
        ("train JOBS:good --resume --restart", "give one of them, not both"),
        ("train JOBS:good --tune --plan plan.toml", "leave one of them out"),
        ("train JOBS:lost_samples", "the data failed at batch 0 of epoch 1: KeyError"),
    ],
)
def test_bad_input_is_one_sentence(arguments, message, vivace, plans, tmp_path):
    (tmp_path / "syntax.py").write_text("import torch\nx = (1 +\n")
    (tmp_path / "leaving.py").write_text("raise SystemExit(0)\njob = None\n")
    (tmp_path / "script.py").write_text("raise RuntimeError('run blindly')\n")
    (tmp_path / "two.py").write_text("small = vivace.Job()\ndef large(width=8):\n    return vivace.Job()\n")
    done = vivace(*arguments.split(), "--json")
    assert message.replace("{JOBS}", str(JOBS)) in done.sentence
    assert done.code == 2
    assert done.document["error"]["message"] == done.sentence
    assert done.document["error"]["kind"] != "InternalError"


def test_an_empty_plan_is_verified_without_a_step(vivace, plans):
    done = vivace("verify", f"{JOBS}:raising", "--plan", "empty.toml", "--json")
    assert done.code == 0
    assert done.document["kept"] is True
    assert done.document["steps"] == done.document["num_checks"] == 0
    assert "there is nothing to verify" in done.document["reason"]
    shown = vivace("verify", f"{JOBS}:good", "--plan", "empty.toml")
    assert shown.code == 0
    told = " ".join(f"{shown.output} {shown.errors}".split())
    assert "there is nothing to verify" in told
    assert "0 checks" not in told


def test_a_plan_that_changes_nothing_is_no_kept_promise(vivace, tmp_path):
    (tmp_path / "idle.toml").write_text("format = 1\n[techniques.planted_idle]\n")
    done = vivace("verify", f"{SCENES / 'idle.py'}:job", "--plan", "idle.toml", "--json")
    assert done.code == 2
    assert done.sentence == "planted_idle: it changed nothing: every step is as before"
    assert done.document["error"] == {"kind": "Refused", "message": done.sentence}


@pytest.mark.parametrize("verb", ["compress", "export"])
def test_a_gpu_that_is_here_is_refused_where_none_is_served(verb):
    with pytest.raises(InputError, match=f"{verb} is for the processor, and not for cuda:1"):
        require_processor(verb, "cuda:1")
    require_processor(verb, "cpu")
    require_processor(verb, None)


@pytest.mark.fault(36)
@pytest.mark.parametrize("command", ["train", "tune"])
def test_folders_of_other_people_are_left_alone(command, vivace, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "text.txt").write_text("mine")
    done = vivace(command, "JOBS:good", "--out", "thesis", "--json")
    assert done.code == 2
    assert "text.txt" in done.sentence
    assert done.document["error"]["kind"] == "FolderError"
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["text.txt"]
    below = vivace(command, "JOBS:good", "--out", "thesis/text.txt/run", "--json")
    assert below.code == 2
    assert "text.txt/run" in below.sentence
    assert (tmp_path / "thesis" / "text.txt").read_text() == "mine"


@pytest.mark.fault(36)
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(vivace, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    done = vivace("train", "JOBS:good", "--out", "locked/run", "--json")
    assert done.code == 2
    assert "locked/run" in done.sentence


def test_training_prints_one_document_however_much_the_job_prints(vivace, tmp_path):
    done = vivace("train", "JOBS:noisy", "--out", "run", "--json")
    assert done.code == 0
    assert done.output.count("\n") == 1
    keys = "run_path steps epochs metric loss seconds samples_per_second resumed_from_step"
    assert set(keys.split()) <= set(done.document)
    assert done.document["steps"] == 4
    for place in ("at import", "in data", "in loss", "by a child process"):
        assert f"printed {place}" in done.errors
    model = (tmp_path / "run" / "model.pt").read_bytes()

    again = vivace("train", "JOBS:noisy", "--out", "run", "--json")
    assert again.code == 2
    assert "--resume" in again.sentence
    assert (tmp_path / "run" / "model.pt").read_bytes() == model

    resumed = vivace("train", "JOBS:noisy", "--out", "run", "--resume", "--json")
    assert resumed.code == 0
    assert resumed.document["resumed_from_step"] == 4


@pytest.mark.fault(41)
def test_no_sentence_steers_the_terminal(vivace, tmp_path):
    (tmp_path / "job.py").write_text(
        "job = None\nraise ValueError('\\x1b]0;mine\\x07 \\x1b[2J \\x9b2J red')\n"
    )
    done = vivace("train", "job.py:job", "--out", "run")
    assert done.code == 2
    assert "]0;mine" in done.sentence
    assert done.sentence.isprintable()


def test_a_notice_steers_no_terminal_either(capfd):
    from vivace.command.progress import TrainProgress
    from vivace.events import Event, EventKind

    with TrainProgress() as progress:
        progress(Event(EventKind.NOTICE, {"text": "\x1b]0;mine\x07 [bold]a sample of fire:fire:fire"}))
    shown = capfd.readouterr().err.rstrip("\n")
    assert "]0;mine" in shown
    assert "[bold]a sample of fire:fire:fire" in shown
    assert shown.isprintable()


def test_quiet_says_nothing(vivace):
    done = vivace("train", "JOBS:good", "--out", "run", "--quiet")
    assert (done.code, done.output, done.errors) == (0, "", "printed at import\n")


def test_divergence_is_the_answer_no(vivace, tmp_path):
    done = vivace("train", "JOBS:nan", "--out", "run", "--json")
    assert done.code == 1
    assert "what the model gives is still finite in step 1 (epoch 1)" in done.sentence
    assert done.document["error"]["kind"] == "Diverged"
    assert not (tmp_path / "run" / "model.pt").exists()


def test_an_interrupted_training_keeps_its_work_and_ends_with_130(begin, tmp_path):
    (tmp_path / "long.py").write_text(
        "from vivace.job import load\n"
        "import dataclasses, time\n"
        "def slow(model, batch):\n"
        "    time.sleep(0.05)\n"
        f"    return load({str(JOBS) + ':good'!r}).loss(model, batch)\n"
        f"job = dataclasses.replace(load({str(JOBS) + ':good'!r}), loss=slow, epochs=1000)\n"
    )
    command = begin("train", "long.py:job", "--out", "run", "--json")
    log, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 60
    while time.monotonic() < deadline and not (log.exists() and log.read_text().count("\n") > 2):
        time.sleep(0.05)
    os.kill(command.process.pid, signal.SIGINT)
    done = command.wait()
    assert done.code == 130, done.errors
    assert done.document["interrupted"]
    assert done.document["steps"] > 0
    assert "Traceback" not in done.errors
    assert any((tmp_path / "run" / "checkpoints").iterdir())


LATE = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background command ignores it
class Late:
    def __del__(self, kill=os.kill, process=os.getpid(), number=signal.SIGINT):
        kill(process, number)
late = Late()  # Python lets go of it at its very end
from vivace.command.cli import main
main()
"""
ABORTED = """
from vivace.command import cli
def app(**_):
    raise KeyboardInterrupt
cli.app = app
cli.main()
"""


@pytest.mark.parametrize(("code", "expected"), [(LATE, 0), (ABORTED, 130)])
def test_ctrl_c_beside_a_commands_work_ends_with_its_code(code, expected):
    command = [sys.executable, "-c", code, "recipes", "--json", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (expected, "")
    assert expected or json.loads(done.stdout)


def test_fits_answers_for_every_card_on_which_vivace_trains(vivace):
    from vivace.advising.catalogue import load_catalogue

    done = vivace("inspect", "--fits", "JOBS:good", "--json")
    assert done.code == 0
    found = done.document["fits"]
    as_in_advice = {name: card.usable_bytes for name, card in load_catalogue().items() if card.trains}
    assert {fit["card"]: fit["usable_bytes"] for fit in found} == as_in_advice
    assert all(fit["fits"] and fit["needed_bytes"] < 2**30 for fit in found)
    assert re.search(r"a training step needs about [56]\d\d MiB", done.errors)


def test_fits_knows_of_autocast_that_is_made_as_the_jobs_file_is_loaded(vivace, tmp_path):
    job = """
import torch
import vivace

region = torch.autocast("cuda", enabled=ENABLED)


def loss(model, batch):
    with region:
        return model(batch).float().square().mean()


job = vivace.Job(
    model=lambda: torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]),
    data=lambda: [torch.ones(16384, 1024)],
    loss=loss,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
)
"""
    needed = []
    for enabled in (True, False):
        (tmp_path / f"{enabled}.py").write_text(job.replace("ENABLED", str(enabled)))
        done = vivace("inspect", "--fits", f"{tmp_path}/{enabled}.py:job", "--json")
        needed.append(done.document["fits"][0]["needed_bytes"])
    assert needed[0] < needed[1]


def test_fits_answers_for_cards_that_divide_the_weights(vivace, tmp_path):
    (tmp_path / "fsdp.toml").write_text("format = 1\n[techniques.fsdp]\n")
    options = ("--plan", str(tmp_path / "fsdp.toml"), "--ranks", "2")
    done = vivace("inspect", "--fits", "JOBS:good", *options, "--json")
    assert done.code == 0, done.sentence
    assert {fit["ranks"] for fit in done.document["fits"]} == {2}
    assert re.search(r"a training step needs about [56]\d\d MiB on each of 2 cards", done.errors)
    done = vivace("inspect", *options, "--json")
    assert (done.code, "name one" in done.sentence) == (2, True)
    done = vivace("inspect", "--fits", "JOBS:good", "--ranks", "2", "--json")
    assert (done.code, "for a plan that divides the weights" in done.sentence) == (2, True)


@pytest.mark.parametrize(
    ("job", "sentence"),
    [
        ("nowhere.py:job", "nowhere.py"),
        ("JOBS:bogus", "bogus"),
        ("JOBS:empty", "the loader is empty"),
        ("JOBS:raising", "ZeroDivisionError"),
        ("JOBS:no_module", "model"),
        ("JOBS:no_optimizer", "optimizer"),
        ("JOBS:silent_step", "own step cannot be predicted"),
        ("JOBS:float_loss", "looks at numbers, which a prediction does not have"),
        ("JOBS:lost_samples", "data failed while loading"),
    ],
)
def test_fits_says_in_one_sentence_why_there_is_no_answer(vivace, job, sentence):
    done = vivace("inspect", "--fits", job, "--json")
    assert done.code == 2
    assert sentence in done.sentence
    assert done.document["error"]["message"] == done.sentence


@pytest.mark.parametrize(
    ("typed", "place", "offered"), [("vivace compa", 1, "compare"), ("vivace tune --bud", 2, "--budget")]
)
def test_a_shell_completes_commands_and_options(typed, place, offered):
    code = "import sys; sys.argv = ['vivace']; from vivace.command.cli import main; main()"
    environment = {"_VIVACE_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(place)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == [offered], done.stderr


def test_a_full_or_closed_standard_output_is_one_sentence():
    command = [sys.executable, "-m", "vivace", "recipes", "--json"]
    full = "standard output cannot be written: No space left on device"
    for arguments, said in ((command, full), ([*command, "nowhere"], "there is no recipe 'nowhere'")):
        with open("/dev/full", "w") as disk:
            done = subprocess.run(arguments, stdout=disk, stderr=subprocess.PIPE, text=True, check=False)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert done.stderr.startswith(f"vivace: {said}")
    with open("/dev/full", "w") as disk:
        done = subprocess.run([*command[:3], "--version"], stdout=disk, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, f"vivace: {full}\n")
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    done = subprocess.run(closed, stderr=subprocess.PIPE, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") <= 1


@pytest.fixture(params=["a pipe that nobody reads", "a file on a full disk"])
def lost(request):
    """Where a command's messages cannot be written any more."""
    if request.param == "a file on a full disk":
        writer = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, writer = os.pipe()
        os.close(reader)
    yield writer
    os.close(writer)


def test_what_nobody_reads_any_more_changes_no_exit_code(lost):
    codes = {}
    for command in ("recipes", "report nowhere"):
        arguments = [sys.executable, "-m", "vivace", *command.split()]
        codes[command] = subprocess.run(arguments, stderr=lost, check=False).returncode
    assert codes == {"recipes": 0, "report nowhere": 2}


def test_a_training_outlives_the_reader_of_its_progress(lost):
    code = """
from vivace.command.progress import TrainProgress
from vivace.events import Event, EventKind

with TrainProgress() as progress:
    for text in "ab":
        progress(Event(EventKind.NOTICE, {"text": text}))
print("trained")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=lost, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "trained\n")


def test_a_name_that_is_no_text_stands_in_the_document():
    command = [sys.executable, "-m", "vivace", "report", b"no\xff", "--json"]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 2
    assert "there is no folder 'no\udcff'" in json.loads(done.stdout)["error"]["message"]
    assert b"Traceback" not in done.stderr


def test_inspect_leaves_no_option_out_silently(vivace):
    done = vivace("inspect", "--fits", "JOBS:good", "--measure", "--json")
    assert (done.code, done.document["error"]["kind"]) == (2, "InputError")
    assert "--measure" in done.sentence


def test_a_report_tells_the_whole_command_of_its_search():
    found = cli.again("my jobs/train.py:job", 2, budget="fast", out=Path("a b"), steps=None, device="cuda:1")
    start = "torchrun --nproc-per-node 2 -m vivace tune 'my jobs/train.py:job'"
    assert found == f"{start} --budget fast --out 'a b' --device cuda:1"
