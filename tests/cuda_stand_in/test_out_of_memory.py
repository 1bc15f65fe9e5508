"""A GPU's memory ends at one allocation after another: each time the error says so."""

import json
from pathlib import Path

import pytest

from vivace.plan import Plan

ENDS = """
import json, multiprocessing, os, sys
from pathlib import Path
import vivace
from vivace import inspect
from vivace.errors import VivaceError
from vivace.testing import jobs

plan = vivace.Plan.from_dict(json.loads(sys.argv[1]))

def trained(allocations):
    os.environ["STAND_IN_FULL_AFTER"] = str(allocations)
    try:
        vivace.train(jobs.mlp(), plan, out=Path(sys.argv[2], str(allocations)))
    except VivaceError as error:
        return f"{error.kind}: {error}"
    except Exception as error:
        return f"FAILED {type(error).__name__}: {error}"
    return "done"

inspect()
with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
    print(json.dumps(pool.map(trained, json.loads(sys.argv[3]), chunksize=1)))
"""
EAGER, GRAPH, AHEAD = {}, {"fused_optimizer": {}, "cuda_graph_step": {}}, {"pinned_prefetch": {}}


@pytest.mark.parametrize(
    ("plan", "cached", "allocations"),
    [(EAGER, False, [0, 3, 1000]), (GRAPH, True, [0, 1, 1000])],
    ids=["eager", "graph"],
)
def test_it_is_named(stand_in, tmp_path, monkeypatch, plan, cached, allocations):
    """Without torch's cache every tensor is an allocation; a graph needs the cache."""
    if not cached:
        monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    printed = stand_in.python(ENDS, json.dumps(plan), tmp_path, json.dumps(allocations), computes=True)
    told = json.loads(printed.splitlines()[-1])
    assert told[-1] == "done"
    assert told.count("done") <= len(told) / 2
    assert [one for one in told if one != "done" and "out of memory" not in one] == []


def test_a_batch_that_is_brought_ahead_is_not_the_datas_fault(stand_in, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    allocations = list(range(4, 40, 3))
    printed = stand_in.python(ENDS, json.dumps(AHEAD), tmp_path, json.dumps(allocations), computes=True)
    told = json.loads(printed.splitlines()[-1])
    assert any("the GPU's memory does not hold batch" in one for one in told), told
    assert [one for one in told if "the data failed" in one] == []


JOB = f"{Path(__file__).with_name('job.py')}:job"
LOCKING = {"pinned_prefetch": {}, "offload_optimizer": {}, "offload_activations": {"smallest_kib": 1}}


@pytest.mark.parametrize("name", LOCKING)
def test_page_locked_memory_of_the_host_is_not_called_the_gpus(stand_in, tmp_path, name):
    plan = Plan.from_dict({name: LOCKING[name]})
    plan.save(tmp_path / "plan.toml")
    words = ("train", JOB, "--plan", tmp_path / "plan.toml", "--out", tmp_path / "run")
    done = stand_in.vivace(*words, computes=True, host_full_after=1)
    told = " ".join(done.stderr.split())
    assert done.returncode == 1, told
    assert "the host" in told
    assert "page-locked" in told
    assert "the GPU's memory does not hold batch" not in told


WITH_PINNING = """
import dataclasses, sys
from pathlib import Path
import vivace
from torch.utils.data import DataLoader
from vivace.testing import jobs

def data():
    samples = jobs.mlp().data().dataset
    return DataLoader(samples, batch_size=4, pin_memory=True, num_workers=int(sys.argv[2]))

try:
    vivace.train(dataclasses.replace(jobs.mlp(), data=data), out=Path(sys.argv[1]))
except vivace.OutOfMemory as error:
    print(error)
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_nor_where_a_loader_locks_it(stand_in, tmp_path, workers):
    told = stand_in.python(WITH_PINNING, tmp_path / "run", workers, computes=True, host_full_after=1)
    assert told.startswith("the host's memory does not hold batch "), told
    assert "pin_memory=False" in told


ENDS_LATE = """
import dataclasses, sys
from pathlib import Path
import torch, vivace
from torch import nn
from torch.utils.data import DataLoader
from vivace.testing import jobs

where = sys.argv[2]

def hungry():
    torch.empty(90 << 30, dtype=torch.uint8, device="cuda")

class Model(nn.Sequential):
    steps = 0

    def forward(self, features):
        self.steps += self.training
        if self.steps == 5 and self.training:
            if where == "fault":
                raise ValueError("bad labels")
            if where == "step":
                hungry()
        return super().forward(features)

def metric(model, batches):
    for _ in batches:
        pass
    hungry()

job = dataclasses.replace(
    jobs.mlp(),
    model=lambda: Model(*jobs.mlp().model()),
    data=lambda: DataLoader(jobs.mlp().data().dataset, batch_size=1 if where == "step" else 16),
    validation=jobs.mlp().data if where == "metric" else None,
    metric=metric if where == "metric" else None,
    epochs=2,
)
try:
    vivace.train(job, out=Path(sys.argv[1]))
except vivace.VivaceError as error:
    print(f"{error.kind}: {error}")
"""


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("fault", "JobError: step 5 of the training failed: ValueError: bad labels"),
        ("step", "OutOfMemory: the step ran out of memory"),
        ("metric", "OutOfMemory: there is not enough memory for the Job's metric"),
    ],
)
def test_steps_before_the_end_are_kept(stand_in, tmp_path, where, told):
    printed = stand_in.python(ENDS_LATE, tmp_path / "run", where, computes=True)
    assert printed.startswith(told)
    assert "step_4 in " in printed
    assert (tmp_path / "run" / "checkpoints" / "step_4").is_dir()


@pytest.mark.parametrize(
    ("verb", "more"), [("profile", []), ("verify", ["--plan", "plan.toml", "--budget", "5"])]
)
def test_a_verb_says_what_the_memory_does_not_suffice_for(stand_in, tmp_path, monkeypatch, verb, more):
    monkeypatch.chdir(tmp_path)
    Plan.from_dict({"fused_optimizer": {}}).save("plan.toml")
    done = stand_in.vivace(verb, JOB, *more, computes=True, full_after=0)
    assert done.returncode == 1, done.stderr
    assert "vivace: there is not enough memory to " in done.stderr


CAPTURES = """
import dataclasses, sys
from pathlib import Path
import torch, vivace
from vivace.testing import jobs

class Model(torch.nn.Sequential):
    def forward(self, features):
        if torch.cuda.is_current_stream_capturing():
            torch.empty(90 << 30, dtype=torch.uint8, device="cuda")
        return super().forward(features)

job = dataclasses.replace(jobs.mlp(), model=lambda: Model(*jobs.mlp().model()), epochs=5)
plan = vivace.Plan.from_dict({"cuda_graph_step": {}, "fused_optimizer": {}})
try:
    print(vivace.train(job, plan, out=Path(sys.argv[1])).notices)
except vivace.VivaceError as error:
    print(f"{error.kind}: {error}")
"""


def test_a_step_that_is_captured_runs_out_of_memory_as_any_other(stand_in, tmp_path):
    told = stand_in.python(CAPTURES, tmp_path / "run", computes=True)
    assert told.startswith("OutOfMemory: the step ran out of memory (OutOfMemoryError: CUDA out of memory"), (
        told
    )
