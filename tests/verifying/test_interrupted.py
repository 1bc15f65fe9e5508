"""Ctrl-C in the test of the metric: the pairs that are finished stay, and the exit code says so."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

TRAINING = """
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import vivace

torch.set_num_threads(1)
inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
samples = TensorDataset(inputs, inputs[:, :4].argmax(1))


def accuracy(model, batches):
    time.sleep(0.4)
    return torch.cat([(model(x).argmax(1) == y).float() for x, y in batches]).mean().item()


job = vivace.Job(
    model=lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)),
    data=lambda: DataLoader(samples, batch_size=16, shuffle=True),
    loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
    metric=accuracy,
    epochs=1,
)
"""


@pytest.mark.parametrize("pairs", [0, 2])
def test_ctrl_c_loses_no_finished_pair(tmp_path, pairs):
    """As a terminal sends it, to the command's whole group; before the third pair no look decides."""
    (tmp_path / "training.py").write_text(TRAINING)
    (tmp_path / "plan.toml").write_text("format = 1\n\n[techniques.fused_optimizer]\n")
    words = ["verify", "training.py:job", "--plan", "plan.toml", "--metric", "--margin", "0.01", "--json"]
    command = [sys.executable, "-m", "vivace", *words, "--seeds", "9", "--budget", "600"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=tmp_path, text=True, start_new_session=True, **pipes)
    waited_for = f"seed {pairs} of at most 9" if pairs else "the reference has run"
    assert process.stderr is not None
    for line in process.stderr:
        if waited_for in line:
            break
    started = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert started
    assert psutil.wait_procs(started, timeout=10.0)[1] == []
    document = json.loads(output)
    if not pairs:
        assert document["error"]["kind"] == "KeyboardInterrupt"
        return
    metric = document["metric"]
    assert (metric["n"], metric["interrupted"], document["kept"]) == (2, True, None)
    assert len(metric["plan"]) == len(metric["reference"]) == 2
    assert "as it was interrupted after 2 of 9 seeds: about " in document["reason"]
    assert document["num_checks"] > 1
