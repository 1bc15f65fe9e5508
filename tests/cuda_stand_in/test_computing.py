"""A stand-in that computes: training there is training on the processor, by whatever path torch takes."""

import json

import pytest

SAME = """
import dataclasses, json, sys
import torch
from vivace import inspect
from vivace.plan import Plan
from vivace.session.opening import start
from vivace.testing import jobs

torch.backends.cudnn.conv.fp32_precision = "ieee"
machine = inspect()
found = {}
for name in sys.argv[2].split():
    job = jobs.TINY_JOBS[name]()
    with start(job, Plan.from_dict(json.loads(sys.argv[1])), machine) as session:
        batches = [*job.data(), *job.data()]
        losses = [float(session.step(batch)) for batch in batches]
        found[name] = [str(session.build.device), losses, session.build.notes.get("replays", 0)]
print(json.dumps(found))
"""
JOBS = "mlp cnn lstm"


def trained(stand_in, plan, names, **settings):
    return json.loads(stand_in.python(SAME, json.dumps(plan), names, computes=True, **settings))


@pytest.fixture(scope="module")
def on_the_processor(stand_in):
    return trained(stand_in, {}, JOBS, gpus=0)


@pytest.mark.parametrize("plan", [{}, {"fused_optimizer": {}, "cuda_graph_step": {}}])
def test_losses_are_the_processors(stand_in, on_the_processor, plan):
    """Eager bit for bit; a graph's optimizer rounds otherwise, as it does on a GPU."""
    found = trained(stand_in, plan, JOBS)
    for name, (device, losses, _) in on_the_processor.items():
        assert (device, found[name][0]) == ("cpu", "cuda:0")
        assert found[name][1] == (pytest.approx(losses, rel=1e-5) if plan else losses)
        assert losses[-1] != losses[0]
        assert found[name][2] == (6 if plan else 0)


def test_masks_of_dropout_follow_the_gpus_stream_also_in_graphs(stand_in):
    printed = stand_in.python(
        """
import torch
from torch.nn.functional import dropout
ones = torch.ones(1000, device="cuda")
torch.cuda.manual_seed(1)
own, eager = torch.get_rng_state(), [dropout(ones) for _ in range(3)]
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    mask = dropout(ones)
torch.cuda.manual_seed(1)
replayed = []
for _ in range(3):
    graph.replay()
    replayed.append(mask.clone())
print([torch.equal(a, b) for a, b in zip(eager, replayed)], torch.equal(eager[0], eager[1]))
print(torch.equal(own, torch.get_rng_state()), 0.4 < float((mask == 0).float().mean()) < 0.6)
""",
        computes=True,
    )
    assert printed.splitlines() == ["[True, True, True] False", "True True"]
