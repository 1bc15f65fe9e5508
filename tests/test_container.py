"""The Dockerfile does what continuous integration does, and the notebook runs what is there."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import types
from fnmatch import fnmatch
from pathlib import Path

import pytest
import typer.main

import vivace
from vivace.command.cli import app

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
PIPELINE = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
NOTEBOOK = json.loads((ROOT / "examples" / "colab.ipynb").read_text(encoding="utf-8"))
CELLS = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
COMMAND = re.compile(r"^\s*[!%](.+)$", re.MULTILINE)


def stage(name):
    (found,) = re.findall(rf"^FROM base AS {name}\n(.*?)(?=^FROM|\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
    return found


def test_the_image_has_the_packages_of_continuous_integration():
    wanted = re.findall(r"packages\+=\((.*?)\)", PIPELINE)
    (installed,) = re.findall(r"apt-get install -y -qq --no-install-recommends (.*?) \\", DOCKERFILE)
    assert sorted(installed.split()) == sorted({name for names in wanted for name in names.split()})
    assert "apt-get install -y -qq --no-install-recommends" in PIPELINE


def test_the_image_is_checked_by_the_steps_of_continuous_integration():
    steps = re.findall(r"^(scripts/.*?)(?: \|\| status=1)?$", PIPELINE, re.MULTILINE)
    assert steps[:2] == ["scripts/browser", "scripts/check"]
    assert re.findall(r"^RUN (.*)$", stage("checked"), re.MULTILINE) == steps


@pytest.mark.parametrize(
    ("programs", "said"),
    [
        ({"chromium": "exit 1"}, ""),  # there already: nothing is asked of it
        ({}, "there is no apt-get"),
        ({"apt-get": "exit 0", "id": "echo 1000"}, "only root"),
        ({"apt-get": "exit 100", "id": "echo 0"}, "the lists of packages cannot be read"),
        ({"apt-get": '[ "$1" = update ]', "id": "echo 0"}, "Chromium cannot be installed"),
        ({"apt-get": 'echo "$@" >>asked', "id": "echo 0"}, ""),
    ],
)
def test_where_no_browser_can_be_had_everything_goes_on(tmp_path, programs, said):
    for name in ("bash", "env", "timeout"):
        (tmp_path / name).symlink_to(shutil.which(name))
    for name, does in programs.items():
        (tmp_path / name).write_text(f"#!{tmp_path / 'bash'}\n{does}\n")
        (tmp_path / name).chmod(0o755)
    command, environment = [tmp_path / "bash", ROOT / "scripts" / "browser"], {"PATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert said in done.stderr
    assert bool(said) == bool(done.stderr)
    asked = tmp_path / "asked"
    assert not asked.exists() or asked.read_text().splitlines()[-1].endswith(" chromium")


def test_the_image_starts_the_command_of_the_environment_that_it_made():
    assert 'ENTRYPOINT ["vivace"]' in DOCKERFILE
    (root,) = re.findall(r"^WORKDIR (.*)\nCOPY \. \.", DOCKERFILE, re.MULTILINE)
    assert f"ENV PATH={root}/.venv/bin:$PATH" in DOCKERFILE
    (extras,) = re.findall(r"^RUN scripts/setup (.*)$", DOCKERFILE, re.MULTILINE)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert all(f"\n{extra} = [" in project for extra in extras.split())


def test_nothing_of_the_repository_is_kept_out_of_the_image():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    patterns = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    hidden = [
        name
        for name in filter(None, listed.stdout.split("\0"))
        for pattern in patterns
        if fnmatch(name, pattern.removeprefix("**/")) or fnmatch(name, f"{pattern}/*")
    ]
    assert hidden == []


def test_the_notebook_is_of_the_format_and_its_cells_parse():
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])
    assert all(cell["outputs"] == [] for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code")
    for cell in CELLS:
        ast.parse(re.sub(r"^(\s*)[!%].*$", r"\1pass", cell, flags=re.MULTILINE))


def test_the_notebook_runs_commands_that_are_there():
    known, seen = typer.main.get_command(app).commands, set()
    for line in (line for cell in CELLS for line in COMMAND.findall(cell)):
        program, *arguments = line.split()
        options = [word for word in arguments if word.startswith("--")]
        seen.add(program)
        if program == "vivace":
            offered = {name for parameter in known[arguments[0]].params for name in parameter.opts}
            assert set(options) <= offered, line
        elif "/" in program:
            assert os.access(ROOT / program, os.X_OK), line
            told = (ROOT / program).read_text(encoding="utf-8")
            assert all(option in told for option in options), line
        else:
            assert program in ("git", "cd", "pip", "cat"), line
    assert seen >= {"vivace", "benchmarks/gpu.sh"}
    assert "!vivace demo" in "\n".join(CELLS)


def test_the_notebook_needs_nothing_beside_the_demo_extra():
    (line,) = [line for cell in CELLS for line in COMMAND.findall(cell) if line.startswith("pip")]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (demo,) = re.findall(r"^demo = \[(.*)\]$", project, re.MULTILINE)
    wanted = {re.split(r"[>=]", name.strip(' "'))[0] for name in demo.split(",")} - {"vivace[torch]"}
    assert set(line.split()[3:]) == {".", *wanted}


def test_the_notebook_shows_what_the_demo_left(tmp_path, monkeypatch):
    (cell,) = [cell for cell in CELLS if "vivace.compare" in cell]
    monkeypatch.chdir(tmp_path)
    for name, seconds in (("reference", 90.0), ("train", 60.0)):
        folder = tmp_path / "runs" / "demo" / name
        folder.mkdir(parents=True)
        run = {"steps": 100, "stepping_seconds": seconds, "samples_per_second": 6400 / seconds}
        (folder / "run.json").write_text(json.dumps(run))
    (tmp_path / "runs" / "demo" / "tune").mkdir()
    vivace.Plan.from_dict({"channels_last": {}}).save("runs/demo/tune/plan.toml")
    shown, notebook = [], types.ModuleType("IPython.display")
    notebook.display = lambda thing: shown.append(thing._repr_html_())
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", notebook)
    exec(cell, {})
    plan, compared = shown
    assert "channels_last" in plan
    assert "1.50" in compared
