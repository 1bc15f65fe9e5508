from __future__ import annotations

import pytest
import torch

import vivace
from vivace.ledger import Observation, Profile
from vivace.machine import Device, Machine
from vivace.technique import Build
from vivace.technique.facts import Facts
from vivace.techniques.untried.cuda_graph_step import CudaGraphStep
from vivace.techniques.untried.cuda_graph_step.graph import StepGraph
from vivace.testing.fake_cuda import fake_cuda


def build_on_cuda(optimizer_class, **settings):
    model = torch.nn.Linear(2, 2)
    return Build(
        models=[model],
        optimizer=optimizer_class(model.parameters(), lr=0.1, **settings),
        machine=Machine((Device("cuda", "GPU", 2**34),), 1, {}, {}),
        device=torch.device("cuda"),
        own_step=False,
    )


def test_a_cpu_is_refused(tiny):
    with pytest.raises(vivace.Refused, match="it acts on cuda, and this job runs on cpu"):
        tiny("mlp").open({"cuda_graph_step": {}})


def test_optimizers_that_cannot_be_captured_are_refused_by_name():
    with pytest.raises(vivace.Refused, match="Adagrad cannot be captured"):
        CudaGraphStep().apply(build_on_cuda(torch.optim.Adagrad))


def test_loss_scaling_needs_an_optimizer_that_skips_on_the_device():
    build = build_on_cuda(torch.optim.NAdam)
    build.facts.skipped_steps = 0
    with pytest.raises(vivace.Refused, match="NAdam cannot be captured under fp16 loss scaling"):
        CudaGraphStep().apply(build)
    CudaGraphStep().apply(build_on_cuda(torch.optim.NAdam))


def test_adam_is_capturable_only_while_the_session_is_open():
    build = build_on_cuda(torch.optim.Adam)
    CudaGraphStep().apply(build)
    assert build.optimizer.param_groups[0]["capturable"] is True
    assert build.optimizer.state_dict()["param_groups"][0]["capturable"] is False
    while build.close_callbacks:
        build.close_callbacks.pop()()
    assert build.optimizer.param_groups[0]["capturable"] is False


def test_graphs_of_one_process_warm_up_on_one_stream(monkeypatch):
    """cuBLAS keeps memory for every stream, for the life of the process."""
    with fake_cuda(), monkeypatch.context() as patched:
        made = []

        class Counted(torch.cuda.Stream):
            def __init__(self, device):
                super().__init__()
                made.append(device)

        patched.setattr(torch.cuda, "Stream", Counted)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
        for _ in range(2):
            loss = StepGraph(optimizer, Facts(), {}).beside(torch.sum, torch.ones(3))
            assert float(loss) == 3.0
        assert made == [0]


def test_it_excludes_compile_modes_that_capture():
    for mode in ("reduce-overhead", "max-autotune"):
        with pytest.raises(vivace.VivaceError, match="exclude each other"):
            vivace.Plan.from_dict({"cuda_graph_step": {}, "compile": {"mode": mode}})
    vivace.Plan.from_dict({"cuda_graph_step": {}, "compile": {"mode": "max-autotune-no-cudagraphs"}})


def test_confirmation_and_gain():
    assert CudaGraphStep.card.measured_on == ()
    nothing = Observation({}, {}, 0, 0.0)
    with pytest.raises(vivace.Refused, match="changed nothing"):
        CudaGraphStep().confirm(nothing, nothing)
    profile = Profile("cuda", 0.01, {}, {}, 1000, 0.0, 0, 0)
    _, high = CudaGraphStep.gain(profile, build_on_cuda(torch.optim.Adam).machine)
    assert high == pytest.approx(2.0)
