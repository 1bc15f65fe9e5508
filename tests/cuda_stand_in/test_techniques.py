"""Every technique, and every pair with one for GPUs, trains a few steps on torch's own CUDA code.

Acts or is refused with a reason; nothing else is raised, and what it held is given back.
"""

import json

import pytest

EACH = """
import gc, json, sys, warnings
from itertools import combinations, islice
import torch
from vivace import inspect
from vivace.errors import PlanError, Refused
from vivace.plan import Plan
from vivace.session.opening import start
from vivace.technique import Stage, registry
from vivace.testing import jobs

warnings.simplefilter("error")
warnings.filterwarnings("ignore", category=FutureWarning)
torch.backends.cudnn.enabled = False  # it is not stood in for
torch.backends.cuda.enable_cudnn_sdp(False)
torch.manual_seed(0)
machine = inspect()
ALONE = sys.argv[1] == "alone"

def compiles(cls):
    return cls.card.compiles or cls.name == "fused_batchnorm"  # minutes, for what test_kernels.py tests

def on_gpus_only(cls):
    return cls.card.devices == ("cuda",)

every = [cls for cls in registry.everything() if not compiles(cls) and not cls.card.averages_ranks]
if ALONE:
    wanted = [(cls,) for cls in every]
else:
    wanted = [p for p in combinations([c for c in every if c.card.stage != Stage.DATA or on_gpus_only(c)], 2)
              if any(map(on_gpus_only, p))]
found = {}

def allocated():
    torch._C._cuda_clearCublasWorkspaces()  # which torch keeps before 2.15
    return torch.cuda.memory_allocated()

gc.collect()
gc.freeze()  # what is there now need not be looked at again
for classes in wanted:
    name = " + ".join(cls.name for cls in classes)
    for job in ("mlp", "cnn", "transformer")[: None if ALONE else 1]:
        held = allocated()
        try:
            plan = Plan([cls() for cls in classes])
            with start(getattr(jobs, job)(), plan, machine) as session:
                assert session.build.device.type == "cuda", session.build.device
                for batch in islice(session.batches(getattr(jobs, job)().data()), 3):
                    session.step(batch)
                assert all(p.device.type == "cuda" for m in session.build.models for p in m.parameters())
                outcome = "acted"
        except (Refused, PlanError) as refused:
            outcome = f"refused: {refused}"
        except Exception as error:
            outcome = f"FAILED: {type(error).__name__}: {error}"
        session = batch = None
        gc.collect()
        left = allocated() - held
        found[f"{name} on {job}"] = outcome if left <= 0 else f"{outcome}; {left} bytes stay allocated"
print(json.dumps(found))
"""
# Those that must act here, and what they act on.
ACTS = {
    "cuda_graph_step on mlp",
    "offload_activations on mlp",
    "offload_optimizer on mlp",
    "pinned_prefetch on mlp",
    "tf32 on mlp",
    "allocator on mlp",
    "bf16_autocast on transformer",
    "fp16_autocast on mlp",
    "fused_optimizer on mlp",
    "channels_last on cnn",
}


@pytest.mark.parametrize("which", ["alone", "in pairs"])
def test_it_acts_or_is_refused(stand_in, which):
    found = json.loads(stand_in.python(EACH, which).splitlines()[-1])
    assert {name: told for name, told in found.items() if "FAILED" in told or "stay" in told} == {}
    if which == "alone":
        assert {name for name in ACTS if found[name] != "acted"} == set()
