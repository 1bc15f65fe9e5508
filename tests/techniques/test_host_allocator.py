import ctypes
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import vivace
from vivace.errors import Refused
from vivace.inspection import inspect
from vivace.ledger import Observation
from vivace.observing.observe import observe
from vivace.plan import Plan
from vivace.session.opening import start
from vivace.technique import registry
from vivace.testing import TINY_JOBS, TechniqueContract

HostAllocator = registry.find("host_allocator")


@pytest.mark.usefixtures("one_thread")
class TestHostAllocator(TechniqueContract):
    technique = HostAllocator


def large_job():
    """Activations of 48 MiB: beyond the size up to which glibc adapts its thresholds."""
    return vivace.Job(
        model=lambda: nn.Sequential(nn.Linear(4, 3072), nn.ReLU(), nn.Linear(3072, 1)),
        data=lambda: [torch.ones(4096, 4)],
        loss=lambda model, batch: model(batch).mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )


def page_faults_before_during_and_after():
    seen = []
    for plan in (Plan(), Plan([HostAllocator()]), Plan()):
        with start(large_job(), plan, inspect()) as session:
            seen.append(observe(session, large_job().data()))
    return [one.page_faults for one in seen]


@pytest.mark.skipif(torch.cuda.is_available(), reason="acts on a CPU")
def test_page_faults_vanish_where_tensors_are_large():
    # In a process of its own: glibc uses holes that earlier tests left in its heap, whatever the thresholds.
    code = "import test_host_allocator as here; print(here.page_faults_before_during_and_after())"
    here = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", code], cwd=here, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, during, after = (Observation({}, {}, 0, faults) for faults in json.loads(done.stdout))
    assert before.page_faults > 10_000
    assert "page faults a step" in HostAllocator().confirm(during, before)
    # Fewer where the kernel has huge pages to give.
    assert after.page_faults > before.page_faults / 8, "closing did not give large blocks back to the kernel"


def test_unchanged_page_faults_are_no_evidence():
    few, fewer = Observation({}, {}, 0, 10.0), Observation({}, {}, 0, 6.0)
    with pytest.raises(Refused, match="changed nothing: 10 -> 6"):
        HostAllocator().confirm(fewer, few)


@pytest.mark.skipif(torch.cuda.is_available(), reason="acts on a CPU")
def test_another_c_library_is_refused(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    with pytest.raises(Refused, match="not glibc"):
        start(TINY_JOBS["mlp"](), Plan([HostAllocator()]), inspect())
