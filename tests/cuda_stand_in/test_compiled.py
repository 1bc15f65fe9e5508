"""Plans with `compile`: torch's compiler makes kernels for the GPU, launches and records them.

Triton's kernels compute nothing here: losses mean nothing.
"""

import json

import pytest

TRAINED = """
import json, sys, warnings
from itertools import islice
import torch
from torch._inductor import metrics
from vivace import inspect
from vivace.plan import Plan
from vivace.session.opening import start
from vivace.testing import jobs

torch.backends.cudnn.enabled = False  # it is not stood in for
machine, found = inspect(), {}
for name, (kind, settings) in json.loads(sys.argv[1]).items():
    job = getattr(jobs, kind)()
    metrics.reset()
    plan, noting = Plan.from_dict(settings), warnings.catch_warnings(record=True)
    with start(job, plan, machine) as session, noting as told:
        warnings.simplefilter("always")
        for batch in islice(session.batches(job.data()), 4):
            loss = session.step(batch)
        replays = session.build.facts.replays or 0
    empty = [str(one.message) for one in told if "Graph is empty" in str(one.message)]
    found[name] = [str(loss.device), metrics.generated_kernel_count, replays, empty]
print(json.dumps(found))
"""
GRAPH = {"fused_optimizer": {}, "cuda_graph_step": {}}
HALF = {"channels_last": {}, "bf16_autocast": {}, "fused_batchnorm": {}}
PLANS = {  # the job, the plan, and the replays of its graph
    "alone": ("mlp", {"compile": {}}, 0),
    "in a graph": ("mlp", {"compile": {}, **GRAPH}, 2),
    "in graphs of its own": ("mlp", {"compile": {"mode": "reduce-overhead"}}, 0),
    "with a scaler": ("mlp", {"compile": {}, "fp16_autocast": {}, "pinned_prefetch": {}}, 0),
    "with fused kernels": ("cnn", {"compile": {}, **HALF, **GRAPH}, 2),
}


@pytest.fixture(scope="module")
def found(stand_in):
    plans = json.dumps({name: plan[:2] for name, plan in PLANS.items()})
    return json.loads(stand_in.python(TRAINED, plans).splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_kernels_are_made_and_launched(found, plan):
    device, kernels, replays, empty_graphs = found[plan]
    assert device == "cuda:0"
    assert kernels > 0
    assert replays == PLANS[plan][2]
    assert empty_graphs == []
