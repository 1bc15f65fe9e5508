"""torch's sanitizer of streams watches every technique that uses some: each wait that it has is needed.

A wait is known by the function that asks for it. Trained is once with all of them, and once without each.
"""

import json

WATCHED = """
import dataclasses, json, multiprocessing, sys, traceback
from collections import Counter
from itertools import islice
import torch
import torch.cuda._sanitizer as sanitizer
from torch import nn
from vivace import inspect
from vivace.plan import Plan
from vivace.session.opening import start
from vivace.testing import jobs

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(32, 4)
    def forward(self, x):
        return self.head(torch.cat([self.one(x).relu(), self.two(x).relu()], 1))

def trained(settings, left_out):
    asked = Counter()
    def noted(function):
        def wait(stream, other):
            frame = sys._getframe(1)
            if "vivace" in frame.f_code.co_filename:
                asked[frame.f_code.co_name] += 1
                if frame.f_code.co_name == left_out:
                    return
            function(stream, other)
        return wait
    for name in ("wait_stream", "wait_event"):
        setattr(torch.cuda.Stream, name, noted(getattr(torch.cuda.Stream, name)))
    job = dataclasses.replace(jobs.mlp(), model=Branches) if "branch_streams" in settings else jobs.mlp()
    sanitizer.enable_cuda_sanitizer()
    races = []
    class Noted(sanitizer.CUDASanitizerErrors):  # raised in a backward pass it gets lost
        def __init__(self, errors):
            super().__init__(errors)
            races.append(type(errors[0]).__name__)
    sanitizer.CUDASanitizerErrors = Noted
    try:
        with start(job, Plan.from_dict(settings), machine) as session:
            for batch in islice(session.batches(job.data()), 4):
                session.step(batch)
    except Exception:
        if not races:
            raise
    return "".join(races[:1]), dict(asked)

machine = inspect()
apart = multiprocessing.get_context("fork")
def ask(*arguments):
    with apart.Pool(1) as pool:
        return pool.apply(trained, arguments)
found = {}
for settings in json.loads(sys.argv[1]):
    race, asked = ask(settings, "")
    found[list(settings)[-1]] = {"": race, **{name: ask(settings, name)[0] for name in asked}}
print(json.dumps(found))
"""


PLANS = (
    {"pinned_prefetch": {}},
    {"offload_activations": {"smallest_kib": 1}},
    {"offload_optimizer": {"part_mib": 1}},
    {"branch_streams": {}},
    {"fused_optimizer": {}, "cuda_graph_step": {}},
)
# Keeps a copy from running ahead by more than a step; record_stream alone keeps its memory.
GUARDS_NO_DATA = {("pinned_prefetch", "begin")}


def test_no_wait_is_missing_and_each_is_needed(stand_in):
    found = json.loads(stand_in.python(WATCHED, json.dumps(PLANS)).splitlines()[-1])
    races = {(plan, wait): race for plan, waits in found.items() for wait, race in waits.items()}
    missing = {plan: race for (plan, wait), race in races.items() if not wait and race}
    assert missing == {}
    waits = {key for key in races if key[1]}
    assert {plan for plan, _ in waits} == {list(plan)[-1] for plan in PLANS}
    assert {key for key in waits if not races[key]} == GUARDS_NO_DATA
