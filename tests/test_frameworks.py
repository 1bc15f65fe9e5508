"""The Jobs of the pages for Trainer and Lightning: they train, and their weights go back."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"
NEEDS = {"trainer": "accelerate", "lightning": "lightning"}
TRAIN = """

if __name__ == "__main__":
    run = vivace.train(job(), vivace.Plan.from_dict({"host_allocator": {}}), out="runs/train")
    assert (run.steps, run.epochs, run.metric_name) == (16, 2, "accuracy"), run
"""
CHECK = """
    found = job()
    with torch.no_grad():
        assert found.metric(trained.eval(), found.validation()) == run.metric
        untrained = found.model().eval()
        assert not torch.equal(next(iter(untrained.parameters())), next(iter(trained.parameters())))
"""


@pytest.mark.parametrize("framework", NEEDS)
def test_the_job_trains_and_its_weights_go_back(framework, tmp_path):
    """In a process of its own: each framework sets up the whole process, and warns in its own ways."""
    if importlib.util.find_spec(NEEDS[framework]) is None:
        pytest.skip(f"{NEEDS[framework]} is not installed")
    page = (DOCS / f"use-{framework}.md").read_text(encoding="utf-8")
    job, back = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "train_job.py").write_text(job)
    indented = "".join(f"    {line}\n" for line in back.splitlines())
    (tmp_path / "whole.py").write_text(job + TRAIN + indented + CHECK)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "whole.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    if framework == "trainer":
        assert list(tmp_path.glob("my-model*"))


@pytest.mark.parametrize("framework", NEEDS)
def test_the_page_says_what_works_and_what_does_not(framework):
    page = (DOCS / f"use-{framework}.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.*)$", page, re.MULTILINE)
    assert headings[0] == "The script as it is"
    assert headings[-1] == "What does not work"
    assert "vivace profile -- python train.py" in page
