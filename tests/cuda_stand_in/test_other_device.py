"""A model on the second GPU, while the first is CUDA's current device."""

import pytest

ATTACHED = """
import sys
import torch, vivace
from torch import nn
torch.backends.cudnn.enabled = False  # cuDNN is not stood in for

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(24, 4)
    def forward(self, x):
        return self.head(torch.cat([self.one(x).relu(), self.two(x).relu()], 1))

model = Branches().cuda(1)
plan = vivace.Plan.from_dict({name: {} for name in sys.argv[1].split()})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
used = set()
wait = torch.cuda.Stream.wait_stream
def noted(mine, other):
    used.update((mine.device.index, other.device.index))
    wait(mine, other)
torch.cuda.Stream.wait_stream = noted
def loss(model, batch):
    return model(batch).square().mean()
with vivace.attach(plan, model=model, optimizer=optimizer, loss=loss) as session:
    for _ in range(6):
        session.step(torch.randn(4, 8))
    assert torch.cuda.current_device() == 0
    print(session.build.facts.replays, used)
"""


@pytest.mark.parametrize(("plan", "told"), [("cuda_graph_step", "4 {1}"), ("branch_streams", "None {1}")])
def test_streams_and_graphs_are_the_models_devices(stand_in, plan, told):
    assert stand_in.python(ATTACHED, plan, gpus=2).strip() == told


def test_a_graph_in_which_nothing_was_recorded_is_refused(stand_in):
    """As where a model's step runs on another device than the one that records."""
    printed = stand_in.python(
        """
import torch
from vivace.technique.facts import Facts
from vivace.techniques.cuda_graph_step.graph import StepGraph
from vivace.errors import Refused
weight = torch.ones(3, device="cuda:1", requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=torch.tensor(0.1), fused=True)
graph = StepGraph(optimizer, Facts(), {})
def step(batch):
    return (weight * batch).sum().detach()
try:
    for _ in range(3):
        graph.step(step, torch.ones(3, device="cuda:1"))
except Refused as refused:
    print(refused)
""",
        gpus=2,
    )
    assert "cannot be captured" in printed
    assert "empty" in printed


def test_a_profile_asks_the_gpu_that_a_loop_uses(stand_in):
    """And no other: to ask torch for the random streams of all would start CUDA on each."""
    printed = stand_in.python(
        """
import warnings
import torch
from vivace.profiling.record import facts, gpus, shadow
warnings.simplefilter("error")
kept = torch.ones(2**20, device="cuda:1")
waited = []
torch.cuda.synchronize = waited.append
gpus.wait()
with shadow.same_random_streams():
    torch.ones(2**20, device="cuda:1")
print(gpus.used(), waited, facts.resident_bytes(), facts.peak_bytes())
""",
        gpus=2,
    )
    assert printed.strip() == f"[1] [1] {4 * 2**20} {8 * 2**20}"
