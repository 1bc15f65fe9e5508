"""Float8 products by torch's own operator for GPUs; the stand-in has its arithmetic from the processor."""

import importlib.util
import json

import pytest

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("torchao"), reason="torchao is not installed")

TRAINED = """
import dataclasses, json, multiprocessing, os
import torch
from torch import nn
from vivace import inspect
from vivace.observing.observe import observe
from vivace.plan import Plan
from vivace.session.opening import start
from vivace.testing import jobs

def model():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))

def trained(shown, settings):
    os.environ["CUDA_VISIBLE_DEVICES"] = shown
    job, machine = dataclasses.replace(jobs.TINY_JOBS["mlp"](), model=model), inspect()
    plan = Plan.from_dict(settings)
    with start(job, plan, machine) as session:
        losses = [float(session.step(batch)) for batch in [*job.data(), *job.data()]]
        seen = observe(session, list(job.data()))
        evidence = [one.confirm(seen, seen) for one in plan.techniques]
        return [str(session.build.device), losses, evidence]

def ask(*arguments):
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(trained, arguments)

emulated = {"fp8_linear": {"emulate": True}}
print(json.dumps([ask("", {}), ask("", emulated), ask("0", emulated), ask("0", {"fp8_linear": {}})]))
"""


def test_a_gpus_products_are_those_that_are_emulated(stand_in):
    found = json.loads(stand_in.python(TRAINED, computes=True).splitlines()[-1])
    (_, plain, _), (_, emulated, _), (gpu, there, _), (_, scaled, evidence) = found
    assert gpu == "cuda:0"
    assert plain != emulated
    assert plain == pytest.approx(emulated, rel=0.02)
    assert there == pytest.approx(emulated, rel=1e-5)
    assert scaled == pytest.approx(emulated, rel=1e-3)
    assert evidence == ["3 products in float8, of 1 linear layer"]
