import ctypes

import pytest
import torch
from torch import nn

import vivace
from vivace import registry
from vivace.engine.opening import start
from vivace.errors import Refused
from vivace.inspect import inspect
from vivace.ledger import Observation
from vivace.plan import Plan
from vivace.profile.observe import observe
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="acts on a CPU")
def test_page_faults_vanish_where_tensors_are_large():
    seen = []
    for plan in (Plan(), Plan([HostAllocator()]), Plan()):
        with start(large_job(), plan, inspect()) as session:
            seen.append(observe(session, large_job().data()))
    before, during, after = seen
    assert before.page_faults > 10_000
    assert "page faults a step" in HostAllocator().confirm(during, before)
    # A part of the blocks may find room in what earlier tests left of the heap.
    given_back = after.page_faults > max(2_000, 2 * during.page_faults)
    assert given_back, f"closing kept large blocks: {[one.page_faults for one in seen]}"


def test_unchanged_page_faults_are_no_evidence():
    few, fewer = Observation({}, {}, 0, 10.0), Observation({}, {}, 0, 6.0)
    with pytest.raises(Refused, match="changed nothing: 10 -> 6"):
        HostAllocator().confirm(fewer, few)


@pytest.mark.skipif(torch.cuda.is_available(), reason="acts on a CPU")
def test_another_c_library_is_refused(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    with pytest.raises(Refused, match="not glibc"):
        start(TINY_JOBS["mlp"](), Plan([HostAllocator()]), inspect())
