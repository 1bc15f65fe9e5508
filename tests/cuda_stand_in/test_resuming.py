"""A training on the GPU that is killed goes on bit for bit, under techniques that keep state there."""

import json
import signal

import pytest

KILLED_AND_RESUMED = """
import json, multiprocessing, os, signal, sys
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
import vivace
from vivace.plan import Plan

class Rows(Dataset):
    last = None  # when so many samples have been read, the process is killed

    def __init__(self):
        self.features, self.read = torch.randn(96, 8, generator=torch.Generator().manual_seed(0)), 0

    def __len__(self):
        return len(self.features)

    def __getitem__(self, index):
        self.read += 1
        if self.read == Rows.last:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.features[index], self.features[index, :4].argmax()

job = vivace.Job(
    model=lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4)),
    data=lambda: DataLoader(Rows(), batch_size=16, shuffle=True),
    loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.05),
    epochs=3,
)

def train(out, settings, last, resume, told):
    Rows.last = last
    plan = Plan.from_dict(settings)
    run = vivace.train(job, plan, out=out, resume=resume, checkpoint_every_steps=4, on_broken="ignore")
    told.send([run.resumed_from_step, torch.cuda.max_memory_allocated()])

def child(out, settings, last=None, resume=False):
    ours, theirs = multiprocessing.Pipe()
    given = (out, settings, last, resume, theirs)
    process = multiprocessing.get_context("fork").Process(target=train, args=given)
    process.start()
    process.join()
    return process.exitcode, ours.recv() if ours.poll() else None

folder, found = Path(sys.argv[1]), {}
for name, settings in json.loads(sys.argv[2]).items():
    whole, torn = folder / name / "whole", folder / name / "torn"
    runs = [child(whole, settings), child(torn, settings, last=160), child(torn, settings, resume=True)]
    weights = [torch.load(out / "model.pt", map_location="cpu", weights_only=True) for out in (whole, torn)]
    same = all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    found[name] = [*runs, same]
print(json.dumps(found))
"""
PLANS = {
    "in a graph": {"fused_optimizer": {}, "cuda_graph_step": {}},
    "on side streams": {"pinned_prefetch": {}, "fp16_autocast": {}, "offload_optimizer": {}},
}


@pytest.fixture(scope="module")
def found(stand_in, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return json.loads(
        stand_in.python(KILLED_AND_RESUMED, folder, json.dumps(PLANS), computes=True).splitlines()[-1]
    )


@pytest.mark.parametrize("plan", PLANS)
def test_weights_are_those_of_a_run_that_nobody_killed(found, plan):
    whole, killed, resumed, same = found[plan]
    assert (whole[0], killed, resumed[0]) == (0, [-signal.SIGKILL, None], 0)
    assert whole[1][1] > 0  # it was the GPU that held the weights
    assert resumed[1][0] in (4, 8)
    assert same
