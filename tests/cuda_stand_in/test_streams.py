"""torch's own sanitizer finds no race between streams, and finds one wherever a wait is taken out."""

import json

import pytest

SANITIZED = """
import json, multiprocessing, sys
from itertools import islice
from pathlib import Path
import torch
from torch import nn
from torch.cuda import _sanitizer
from torch.utils.data import DataLoader, TensorDataset
import vivace
from vivace import inspect
from vivace.plan import Plan
from vivace.session.opening import start

torch.backends.cudnn.enabled = False  # it is not stood in for
WAITS = ("wait_stream", "wait_event")

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.one, self.other = (nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = self.stem(x)
        return self.head(torch.cat([self.one(x), self.other(x)], 1).mean((2, 3)))

def job(model, *shape):
    def data():
        rows = torch.randn(32, *shape, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(rows, torch.arange(32) % 4), batch_size=8)

    return vivace.Job(
        model=model,
        data=data,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    )

def mlp():
    return nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4))

JOBS = {"branches": job(Branches, 3, 8, 8), "mlp": job(mlp, 512)}

def place():
    frame = sys._getframe(2)
    while frame and "vivace" not in Path(frame.f_code.co_filename).parts:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}:{frame.f_lineno}" if frame else ""

def watch(seen, without):
    for name in WAITS:
        def call(stream, *arguments, real=getattr(torch.cuda.Stream, name)):
            where = place()
            seen.append(where)
            return None if where == without else real(stream, *arguments)
        setattr(torch.cuda.Stream, name, call)

def trained(job, settings, without=None):
    seen, errors = [], []
    watch(seen, without)
    sanitizer = _sanitizer.CUDASanitizer()
    handler = sanitizer.dispatch.event_handler
    launch = handler._handle_kernel_launch

    def noted(*arguments):  # what it would raise from a thread of autograd's would be lost there
        errors.extend(type(error).__name__ for error in launch(*arguments))
        return []

    handler._handle_kernel_launch = noted
    sanitizer.enable()
    with start(JOBS[job], Plan.from_dict(settings), inspect()) as session:
        del seen[:]
        for batch in islice(session.batches(JOBS[job].data()), 4):
            session.step(batch)
    sanitizer.disable()
    return sorted(set(filter(None, seen))), errors

def ask(*arguments):
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(trained, arguments)

found = {}
for name, (job, settings) in json.loads(sys.argv[1]).items():
    places, errors = ask(job, settings)
    found[name] = errors, {place: ask(job, settings, place)[1] for place in places}
print(json.dumps(found))
"""
# Not cuda_graph_step: the sanitizer does not see what a graph replays.
PLANS = {
    "pinned_prefetch": ("mlp", {"pinned_prefetch": {}}),
    "branch_streams": ("branches", {"branch_streams": {}}),
    "offload_activations": ("mlp", {"offload_activations": {"smallest_kib": 16}}),
    "offload_optimizer": ("mlp", {"offload_optimizer": {"part_mib": 1}}),
}


@pytest.fixture(scope="module")
def found(stand_in):
    return json.loads(stand_in.python(SANITIZED, json.dumps(PLANS)).splitlines()[-1])


@pytest.mark.parametrize("plan", PLANS)
def test_streams_wait_for_each_other(found, plan):
    assert found[plan][0] == []


@pytest.mark.parametrize("plan", PLANS)
def test_each_wait_is_needed(found, plan):
    places = found[plan][1]
    assert places
    assert {place for place, errors in places.items() if not errors} == set()
