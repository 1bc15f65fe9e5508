import pytest
import torch

import vivace
from vivace.ledger import Observation
from vivace.plan import Plan
from vivace.technique import Build, registry
from vivace.testing import TechniqueContract

Allocator = registry.find("allocator")


@pytest.mark.usefixtures("one_thread")
class TestAllocator(TechniqueContract):
    technique = Allocator


def test_settings_are_written_as_the_allocator_reads_them():
    assert Allocator()._text() == "expandable_segments:True"
    plan = Plan.loads(
        "format = 1\n[techniques.allocator]\nexpandable_segments = false\nmax_split_size_mib = 64\n"
        "garbage_collection_threshold = 0.8\n"
    )
    (technique,) = plan.techniques
    assert technique._text() == (
        "expandable_segments:False,max_split_size_mb:64,garbage_collection_threshold:0.8"
    )


def test_settings_are_handed_over_and_taken_back(monkeypatch):
    said = []
    segments = [{"is_expandable": True}, {"is_expandable": False}]
    own = {"allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:32"}}
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", said.append)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: own)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: said.append("empty"))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    build = Build(
        models=[torch.nn.Linear(1, 1)],
        optimizer=None,
        machine=vivace.inspect(),
        device=torch.device("cuda"),
        own_step=True,
    )
    technique = Allocator()
    build.begin(technique)
    technique.apply(build)
    assert said == ["expandable_segments:True", "empty"]
    seams = build.compose({vivace.Seam.STEP: lambda batch: batch})
    assert [seams.step(number) for number in range(3)] == [0, 1, 2]
    seen = Observation({}, {}, 0, 0.0, notes=build.notes)
    assert technique.confirm(seen, seen) == "1 of 2 segments can grow; settings expandable_segments:True"
    while build.close_callbacks:
        build.close_callbacks.pop()()
    assert said[2:] == ["empty", "expandable_segments:False,max_split_size_mb:32"]


def test_another_allocator_and_segments_that_do_not_grow_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    build = Build(
        models=[], optimizer=None, machine=vivace.inspect(), device=torch.device("cuda"), own_step=True
    )
    with pytest.raises(vivace.Refused, match="the allocator is 'cudaMallocAsync'"):
        Allocator().apply(build)
    seen = Observation({}, {}, 0, 0.0, notes={"segments": 3})
    with pytest.raises(vivace.Refused, match="no segment can grow"):
        Allocator().confirm(seen, seen)
