"""What is built is what works: the wheel, outside of the repository, where there is no torch."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WITHOUT_TORCH = """
import importlib.metadata as metadata
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "torchvision"):
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)

sys.meta_path.insert(0, Blocker())
known = metadata.version

def version(name):
    if name == "torch":
        raise metadata.PackageNotFoundError(name)
    return known(name)

metadata.version = version
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """A folder with the unpacked wheel, and a Python there that knows no torch."""
    folder = tmp_path_factory.mktemp("wheel")
    building = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(building, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("vivace-*.whl")
    site = folder / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "sitecustomize.py").write_text(WITHOUT_TORCH)
    return site


@pytest.fixture
def vivace(unpacked, tmp_path):
    """``vivace(*arguments)``: the finished command."""

    def run(*arguments):
        environment = {**os.environ, "PYTHONPATH": str(unpacked)}
        command = [sys.executable, "-m", "vivace", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    return run


def test_the_wheel_is_what_runs(unpacked, tmp_path):
    code = "import vivace; print(vivace.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(done.stdout.strip()).is_relative_to(unpacked)


def test_the_wheel_holds_data_and_no_tests(unpacked):
    names = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    assert "vivace/py.typed" in names
    assert any(name.endswith((".toml", ".csv")) for name in names)
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in names)


@pytest.mark.parametrize(
    "arguments", [("inspect",), ("advise", "resnet50", "--target", "90M"), ("techniques",), ("recipes",)]
)
def test_it_answers_without_torch(arguments, vivace):
    done = vivace(*arguments, "--json", "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "digits"),
        ("tune", "digits"),
        ("verify", "digits", "--plan", "plan.toml"),
        ("profile", "digits"),
        ("export", "digits"),
        ("compress", "digits", "--run", "runs/train"),
        ("sweep", "job.py:job", "lr=1e-4..1e-1:log"),
        ("demo",),
    ],
)
def test_what_trains_says_what_to_install(arguments, vivace):
    done = vivace(*arguments)
    assert done.returncode == 2
    assert "torch is not installed: pip install 'vivace[torch]'" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("to", ["torch", "transformers", "lightning", "accelerate"])
def test_a_plan_is_read_and_written_as_code_without_torch(to, vivace, tmp_path):
    (tmp_path / "plan.toml").write_text("format = 1\n\n[techniques.bf16_autocast]\n")
    done = vivace("export", "--plan", "plan.toml", "--to", to, "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    assert "bf16" in done.stdout or "bfloat16" in done.stdout
    (tmp_path / "plan.toml").write_text("format = 1\n\n[techniques.bf16_autocost]\n")
    assert "did you mean 'bf16_autocast'?" in vivace("export", "--plan", "plan.toml").stderr


def test_two_runs_are_compared_without_torch(vivace, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        run = {"steps": 100, "stepping_seconds": 2.0, "samples_per_second": 3200.0}
        (tmp_path / name / "run.json").write_text(json.dumps(run))
    done = vivace("compare", "a", "b", "--max-regression", "5%", "--json", "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["slower"] is False


def test_a_run_is_reported_without_torch(vivace, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
    assert vivace("report", "run").returncode == 0
    assert "<html" in (run / "report.html").read_text()
