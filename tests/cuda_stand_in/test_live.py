"""`vivace run` beside a script that needs the GPU for itself: its memory, and its recording of graphs."""

import sys

import pytest

# A step needs 900 MiB, most of it in one large block that is free between two steps.
HUNGRY = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(3200, 3200), nn.ReLU(), nn.Linear(3200, 10)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
features, labels = torch.ones(8, 3200).cuda(), torch.zeros(8, dtype=torch.long).cuda()
for step in range(12):
    optimizer.zero_grad()
    block = torch.empty({mib} << 20, dtype=torch.uint8, device="cuda")
    nn.functional.cross_entropy(model(features), labels).backward()
    optimizer.step()
    del block
print("trained")
"""
RECORDS = """
import torch
from torch import nn

model = nn.Linear(8, 4).cuda()
optimizer = torch.optim.Adam(model.parameters(), capturable=True)
features, labels = torch.ones(8, 8).cuda(), torch.zeros(8, dtype=torch.long).cuda()

def step():
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(features), labels).backward()
    optimizer.step()

side = torch.cuda.Stream()
with torch.cuda.stream(side):
    for _ in range(3):
        step()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    step()
graph.replay()
print("trained")
"""


@pytest.fixture
def run(stand_in, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.toml").write_text("format = 1\n\n[techniques.fused_optimizer]\n")

    def under_vivace(script, **settings):
        (tmp_path / "script.py").write_text(script)
        done = stand_in.vivace("run", "--plan", "plan.toml", "--", sys.executable, "script.py", **settings)
        assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
        return " ".join(done.stderr.replace("vivace:", "").split())

    return under_vivace


@pytest.mark.parametrize(
    ("gib", "mib"), [(1, 700), (2, 1500)], ids=["no room", "room, but not in the script's own block"]
)
def test_a_script_keeps_the_memory_that_it_needs(run, gib, mib):
    assert "the memory does not hold its model a second time" in run(HUNGRY.format(mib=mib), gib=gib)


def test_where_there_is_room_a_step_is_copied(run):
    told = run(HUNGRY.format(mib=700))
    assert "does not hold" not in told
    assert "a copy of its step" in told


def test_a_step_that_is_recorded_is_left_alone(run):
    told = run(RECORDS)
    assert "left as it is: it records its steps in a CUDA graph" in told
    assert "fault" not in told


GROWS = """
import torch
from torch import nn
from vivace.live.kept import _has_room

model = nn.Linear(3200, 3200).cuda()
for mib in (700, 2900):
    block = torch.empty(mib << 20, dtype=torch.uint8, device="cuda")
    del block
    print(_has_room(torch.device("cuda", 0), model, [], ()))
"""


def test_room_is_what_a_script_leaves_that_has_grown_since_the_first_look(stand_in):
    assert stand_in.python(GROWS, gib=3).split()[-2:] == ["True", "False"]


SHORT = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
features, labels = torch.ones(8, 8).cuda(), torch.zeros(8, dtype=torch.long).cuda()
for step in range(60):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(features), labels).backward()
    optimizer.step()
print("trained")
"""


def test_an_allocation_of_ours_that_fails_leaves_the_script_as_it_is(stand_in, tmp_path, monkeypatch):
    """One of the process fails, here or there: only one of the script's own ends the script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # so that each tensor is one
    (tmp_path / "plan.toml").write_text("format = 1\n\n[techniques.fused_optimizer]\n")
    (tmp_path / "script.py").write_text(SHORT)
    words = ("run", "--plan", "plan.toml", "--", sys.executable, "script.py")
    ends = []
    for number in (110, 165):
        done = stand_in.vivace(*words, computes=True, full_after=number, full_for=1)
        told = " ".join(done.stderr.replace("vivace:", "").split())
        assert "a fault of Vivace's own" not in told, told
        assert "cannot run fused here" not in told
        ends.append(done.stdout == "trained\n" and "the memory does not hold" in told)
    assert any(ends), told


SAVES = """
import torch
from torch import nn
from vivace.tensors.optimizers import switch_optimizer

model = nn.Linear(8, 4).cuda()
optimizer = torch.optim.Adam(model.parameters())
undo = switch_optimizer(optimizer, {"fused": True, "foreach": False})
model(torch.ones(8, 8).cuda()).sum().backward()
optimizer.step()
state, saved = optimizer.state[model.weight], optimizer.state_dict()["state"][0]
print(state["step"].device, saved["step"].device, saved["exp_avg"] is state["exp_avg"])
"""


def test_a_saved_optimizer_counts_its_steps_where_the_script_does(stand_in):
    assert stand_in.python(SAVES) == "cuda:0 cpu True\n"
