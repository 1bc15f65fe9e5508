"""`scripts/bench`: what it installs before a benchmark runs, from a folder with a space in its name."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bench(tmp_path):
    """``(words) -> done``: the script beside a setup and a Python that print what they are given."""
    place = tmp_path / "a checkout"
    for program, says in (("scripts/setup", "setup"), (".venv/bin/python", "python")):
        (place / program).parent.mkdir(parents=True, exist_ok=True)
        (place / program).write_text(f'#!/bin/sh\necho {says} "$@"\n')
        (place / program).chmod(0o755)
    shutil.copy(ROOT / "scripts/bench", place / "scripts/bench")
    (place / "benchmarks").mkdir()
    for path in (ROOT / "benchmarks").glob("*.py"):
        (place / "benchmarks" / path.name).write_text(
            "def main():\n" if "\ndef main" in path.read_text(encoding="utf-8") else ""
        )
    return lambda *words: subprocess.run(
        [place / "scripts/bench", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("name", "more"),
    [("cpu", ""), ("table", ""), ("sweep", " ray"), ("apis", " opencl vulkan"), ("faults", " test")],
)
def test_a_benchmark_runs_beside_what_it_imports(bench, name, more):
    done = bench(name, "two words", "--small")
    assert (
        done.stdout == f"setup recipes tasks compress{more}\npython benchmarks/{name}.py two words --small\n"
    )


def test_benchmarks_that_borrow_from_the_tests_get_what_tests_need(bench):
    borrow = [
        path.stem
        for path in (ROOT / "benchmarks").glob("*.py")
        if any(word in path.read_text(encoding="utf-8") for word in ("import pytest", '"conftest.py"'))
    ]
    assert sorted(borrow) == ["faults", "gpu_memory"]
    for name in borrow:
        assert bench(name).stdout.startswith("setup recipes tasks compress test\n")


def test_what_there_is_is_listed_and_what_there_is_not_is_said(bench):
    known = bench().stdout.split()
    assert {"cpu", "table", "totals"} <= set(known)
    assert not any(name.startswith("_") for name in known)
    for name in ("speed", "_record", "jobs"):
        done = bench(name)
        assert done.returncode == 2
        assert f"there is no benchmark '{name}'; there are: " in done.stderr
