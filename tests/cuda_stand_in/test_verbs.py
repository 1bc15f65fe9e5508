"""Verbs to their ends on a GPU: what they measure is the stand-in's, and what they say is whole."""

import json
from pathlib import Path

import torch

JOB = f"{Path(__file__).with_name('job.py')}:job"
GPU = "NVIDIA H100 80GB HBM3"


def test_tune_finds_an_answer_for_the_gpu(stand_in, tmp_path):
    for budget in (12, 60, 240):  # the longer ones where a busy machine has no technique timed before
        words = ("tune", JOB, "--budget", budget, "--out", tmp_path / "tune", "--json")
        done = stand_in.vivace(*words, computes=True)
        if done.returncode != 1:
            break
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["baselines"]["strict_fp32"] > 0
    assert "measured" in {trial["status"] for trial in found["trials"]}, found["trials"]
    assert "acts on cuda" not in done.stderr
    assert GPU in Path(found["report_path"]).read_text()
    assert Path(found["plan_path"]).exists()


def test_verify_keeps_a_step_that_is_replayed(stand_in, tmp_path):
    (tmp_path / "plan.toml").write_text("format = 1\n\n[techniques.cuda_graph_step]\n")
    words = ("verify", JOB, "--plan", tmp_path / "plan.toml", "--budget", "10", "--json")
    done = stand_in.vivace(*words, computes=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["kept"], found["promise"]) == (True, "rounding"), found
    assert found["steps"] > 0


MEASURES = """
import json, os
os.environ["XDG_CACHE_HOME"] = os.getcwd()  # what an earlier test measured is not there
from vivace import inspect
from vivace.inspection import measuring
measuring.TOLERATED_SHARE = measuring.TOLERATED_SPREAD = 100.0  # what runs beside the tests is not to be seen
machine = inspect()
found = measuring.measure(machine, seconds=1.0)["cuda"]
ceilings = {key: one.value for key, one in found.ceilings.items()}
print(json.dumps([ceilings, found.absent, sorted(found.unreached), inspect().ceilings]))
"""


def test_inspect_measures_the_gpu_and_names_what_it_could_not(stand_in, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ceilings, absent, unreached, kept = json.loads(stand_in.python(MEASURES).splitlines()[-1])
    assert {"matmul_fp32", "matmul_bf16", "copy_device", "launch_seconds"} <= {*ceilings, *unreached}, absent
    assert ceilings
    assert all(value > 0 for value in ceilings.values())
    assert all(absent.values())
    assert kept == ceilings


def test_the_weights_are_read_without_a_gpu(stand_in, tmp_path):
    """Where torch.load is not told where to put them."""
    done = stand_in.vivace("train", JOB, "--max-steps", 2, "--out", tmp_path / "run", computes=True)
    assert done.returncode == 0, done.stderr
    files = [tmp_path / "run" / "model.pt", *(tmp_path / "run" / "checkpoints").glob("step_*/model.pt")]
    assert len(files) == 2
    assert {str(one.device) for file in files for one in torch.load(file).values()} == {"cpu"}


TIED = """
import sys, torch
from torch import nn
from vivace.training.checkpoints import save_model

layers = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)).cuda()
layers[1].weight = layers[0].weight
with open(sys.argv[1], "wb") as file:
    save_model({**layers.state_dict(), "row": layers[0].weight.detach()[2], "of": 3}, file)
print(layers[0].weight.detach().cpu().tolist())
"""


def test_weights_that_are_one_stay_one_in_the_file(stand_in, tmp_path):
    numbers = json.loads(stand_in.python(TIED, tmp_path / "model.pt", computes=True).splitlines()[-1])
    found = torch.load(tmp_path / "model.pt")
    assert found["0.weight"].tolist() == numbers
    assert found["1.weight"].data_ptr() == found["0.weight"].data_ptr()
    assert found["row"].tolist() == numbers[2]
    assert found["row"].untyped_storage().data_ptr() == found["0.weight"].data_ptr()
    assert found["of"] == 3


ONE_BY_ONE = """
import sys, torch, weakref
from torch import nn
from vivace.training.checkpoints import save_model

original, alive, most = torch.UntypedStorage.cpu, [], []

def cpu(storage):
    copy = original(storage)
    alive.append(weakref.ref(copy))
    most.append(sum(one() is not None for one in alive))
    return copy

torch.UntypedStorage.cpu = cpu
layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).cuda()
with open(sys.argv[1], "wb") as file:
    save_model(layers.state_dict(), file)
print(len(most), max(most))
"""


def test_main_memory_holds_one_tensor_of_the_weights_while_they_are_written(stand_in, tmp_path):
    found = stand_in.python(ONE_BY_ONE, tmp_path / "model.pt", computes=True).splitlines()[-1]
    assert found == "8 1"
    assert {str(one.device) for one in torch.load(tmp_path / "model.pt").values()} == {"cpu"}
