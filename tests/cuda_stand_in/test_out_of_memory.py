"""A GPU's memory ends at one allocation or another: each time the error says so."""

import json

ENDS = """
import json, multiprocessing, os, sys
from pathlib import Path
import vivace
from vivace import inspect
from vivace.errors import VivaceError
from vivace.testing import jobs

GRAPH = {"fused_optimizer": {}, "cuda_graph_step": {}}

def trained(plan, allocations):
    os.environ["STAND_IN_FULL_AFTER"] = str(allocations)
    if not plan:  # every tensor is an allocation then; a graph needs torch's cache
        os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    out = Path(sys.argv[1], f"{len(plan)}-{allocations}")
    try:
        vivace.train(jobs.mlp(), vivace.Plan.from_dict(plan), out=out)
    except VivaceError as error:
        return f"{error.kind}: {error}"
    except Exception as error:
        return f"FAILED {type(error).__name__}: {error}"
    return "done"

inspect()
with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
    asked = [({}, 0), ({}, 3), ({}, 20), (GRAPH, 0), (GRAPH, 1)]
    print(json.dumps(pool.starmap(trained, asked, chunksize=1)))
"""


def test_it_is_named(stand_in, tmp_path):
    """When the first tensor is made, a weight is placed, a step runs; beside and inside a captured step."""
    told = json.loads(stand_in.python(ENDS, tmp_path, computes=True).splitlines()[-1])
    assert [one for one in told if one != "done" and "out of memory" not in one] == []
    assert [one.partition(":")[0] for one in told[:4]] == ["OutOfMemory"] * 4
