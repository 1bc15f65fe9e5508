"""The workflow of docs/compare.md: its steps run here as they stand, on a repository of their own."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from vivace.inspection import inspect, store
from vivace.inspection.ceilings import Ceiling, Survey

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8")
(WORKFLOW,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
STEPS = yaml.safe_load(WORKFLOW)["jobs"]["compare"]["steps"]
SCRIPT = """
import argparse, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
torch.set_num_threads(1)
data = TensorDataset(torch.randn(512, 64), torch.randint(4, (512,)))
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(30 * parser.parse_args().epochs):
    for inputs, labels in DataLoader(data, batch_size=64):
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
SLOWER = SCRIPT.replace(
    "        optimizer.zero_grad()", "        optimizer.zero_grad()\n        time.sleep(0.005)"
)


@pytest.fixture
def runner(tmp_path):
    """``runner(command)`` runs a step as GitHub does, in a checkout whose change is slower than its base."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    there, checkout, tools = tmp_path / "origin", tmp_path / "checkout", tmp_path / "tools"
    (tmp_path / "temp").mkdir()
    tools.mkdir()
    for name, command in (("vivace", "-m vivace"), ("python", "")):
        (tools / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {command} "$@"\n')
        (tools / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "RUNNER_TEMP": str(tmp_path / "temp"),
        "GITHUB_BASE_REF": "main",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_SYSTEM": os.devnull,
    }

    def run(command, folder=checkout):
        return subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", command],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    there.mkdir()
    (there / "train.py").write_text(SCRIPT)
    run("git init -q -b main . && git add . && git -c user.name=a -c user.email=a@b commit -qm base", there)
    run(f"git clone -q {shlex.quote(str(there))} checkout", tmp_path)
    (checkout / "train.py").write_text(SLOWER)
    return run


def test_the_steps_find_that_the_change_is_slower(runner, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ceilings = {"matmul_fp32": 1e11, "convolution_fp32_nchw": 1e11, "copy_device": 1e10}
    known = {name: Ceiling(value, 0.0, 3, "2026-01-01") for name, value in ceilings.items()}
    store.save(inspect().measured_as, "cpu", Survey(known))
    ended = {}
    for step in STEPS:
        if "run" in step and step["name"] != "install":
            ended[step["name"]] = done = runner(step["run"])
            assert done.returncode == (step["name"] == "compare"), done.stderr
    assert "A step takes" in ended["compare"].stderr
    assert (tmp_path / "temp" / "compare" / "compare.html").is_file()


def test_the_workflow_is_whole():
    assert [step["uses"].partition("@")[0] for step in STEPS if "uses" in step] == [
        "actions/checkout",
        "actions/setup-python",
        "actions/upload-artifact",
    ]
    assert STEPS[0]["with"]["fetch-depth"] == 0  # else there is no base to make a work tree of
    (upload,) = [step for step in STEPS if step.get("if") == "always()"]
    (compare,) = [step for step in STEPS if step.get("name") == "compare"]
    out = compare["run"].split("--out ")[1].strip('"')
    assert upload["with"]["path"].replace("${{ runner.temp }}", "$RUNNER_TEMP") == out
