"""The tutorial's two files train the same model, and do what the page says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import vivace
from vivace.job import load

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "tutorial.md").read_text(encoding="utf-8")
PLAIN, JOB = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "plain.py").write_text(PLAIN)
    (tmp_path / "job.py").write_text(JOB)
    return tmp_path


def test_the_job_is_the_script(folder):
    """Same data, network, loss and optimizer: after one epoch both name about as many digits rightly."""
    shorter = PLAIN.replace("range(10)", "range(2)").replace("print(", "print('accuracy', ")
    (folder / "plain.py").write_text(shorter)
    done = subprocess.run(
        [sys.executable, "plain.py"], cwd=folder, capture_output=True, text=True, check=True
    )
    (theirs,) = re.findall(r"tensor\(([0-9.]+)\)", done.stdout)
    job = load(f"{folder / 'job.py'}:job")
    assert job.epochs == 10
    run = vivace.train(f"{folder / 'job.py'}:job", out=folder / "run", max_steps=48)
    assert run.metric == pytest.approx(float(theirs), abs=0.25)
    assert run.metric_data == "validation"
    kept = max((folder / "run" / "checkpoints").iterdir())
    assert any(path.suffix in (".pt", ".safetensors") for path in kept.iterdir())


def test_the_diff_shows_lines_of_both(folder):
    (diff,) = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
    for line in diff.splitlines():
        text = line[1:].strip()
        if not text or "..." in text:
            continue
        where = PLAIN if line.startswith("-") else JOB
        assert text in where


def test_without_a_name_the_name_is_told(folder):
    with pytest.raises(vivace.InputError, match=r"holds job: write .*job\.py:job"):
        load(str(folder / "job.py"))
    with pytest.raises(vivace.InputError, match="is a script without a Job"):
        load(str(folder / "plain.py"))
