"""A recorder in this very process, around a loop of the test's own."""

import json
import os

import pytest
import torch

from vivace.machine import Device, Machine
from vivace.profiling.judge import judge
from vivace.profiling.record import RECORD, TRACE, experiments, shadow
from vivace.profiling.record.recorder import Recorder

CEILINGS = {
    "matmul_fp32": 1e11,
    "matmul_bf16": 4e11,
    "convolution_fp32_nchw": 1e11,
    "copy_device": 1e10,
    "launch_seconds": 1e-6,
}
MACHINE = Machine(
    devices=(Device("cpu", "a processor", 2**34, ("avx2", "avx512_bf16")),),
    num_cores=2,
    versions={},
    limits={},
    ceilings=CEILINGS,
)


@pytest.fixture(autouse=True)
def _nothing_compiled():
    """Whatever other tests of this process have compiled is no part of a recorded loop."""
    from torch._dynamo import utils

    def forget():
        torch._dynamo.reset()
        utils.counters.clear()
        utils.clear_compilation_metrics()
        utils.graph_break_reasons.clear()

    forget()
    yield
    forget()


@pytest.fixture(autouse=True)
def _room(monkeypatch):
    """What other tests of this process have taken is no part of a recorded loop."""
    monkeypatch.setattr(experiments, "free_memory", lambda: 2**60)


@pytest.fixture
def brief_experiments(monkeypatch):
    """Experiments in blocks too short to tell anything, for tests that read nothing off their times."""
    monkeypatch.setattr(shadow, "BLOCK_SECONDS", 0.005)


@pytest.fixture
def recorded(tmp_path, one_thread, monkeypatch):
    """``recorded(loop)``: repeats `loop` (an epoch) under a recorder until it is done; the document.

    One thread, and one core to run it on: with more, that it is one would be a verdict.
    """
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})

    def record(epoch, most=200):
        recorder = Recorder(tmp_path, timed_seconds=0.2)
        recorder.install()
        try:
            for _ in range(most):
                if recorder.done:
                    break
                epoch()
        finally:
            recorder.finish()
        found = json.loads((tmp_path / RECORD).read_text())
        assert found["state"] == "finished", found.get("problems")
        assert "problems" not in found, found["problems"]
        return judge(found, tmp_path / TRACE, MACHINE, "test", None), found

    return record


@pytest.fixture
def judged(tmp_path):
    """``judged()``: the document of the record that lies there."""
    return lambda: judge(json.loads((tmp_path / RECORD).read_text()), tmp_path / TRACE, MACHINE, "test", None)


@pytest.fixture(scope="session")
def batches():
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(32, 64, generator=generator), torch.randint(10, (32,), generator=generator))
        for _ in range(16)
    ]
