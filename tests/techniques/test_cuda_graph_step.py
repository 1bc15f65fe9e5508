from __future__ import annotations

import copy
import dataclasses
from types import SimpleNamespace

import pytest
import torch

import vivace
from vivace.errors import Refused
from vivace.inspection import inspect
from vivace.ledger import Observation, Profile
from vivace.machine import Device, Machine
from vivace.mechanisms.half_precision import ScaledOptimizer
from vivace.observing.observe import observe
from vivace.plan import Plan
from vivace.session.opening import start
from vivace.technique import Build
from vivace.technique.facts import Facts
from vivace.techniques.cuda_graph_step import CudaGraphStep
from vivace.techniques.cuda_graph_step.graph import WARM_UP_STEPS, StepGraph
from vivace.testing import TINY_JOBS, check
from vivace.verifying.ruler import Effort, Ruler

GRAPH = {"fused_optimizer": {}, "cuda_graph_step": {}}
pytestmark = pytest.mark.usefixtures("one_thread")


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


@pytest.mark.gpu
def test_graphs_of_one_process_warm_up_on_one_stream(monkeypatch):
    """cuBLAS keeps memory for every stream, for the life of the process."""
    made = []

    class Counted(torch.cuda.Stream):
        def __new__(cls, *device, **known):  # torch makes one for each stream that it knows
            made.extend(device)
            return super().__new__(cls, *device, **known)

    monkeypatch.setattr(torch.cuda, "Stream", Counted)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1, device="cuda"))])
    for _ in range(2):
        loss = StepGraph(optimizer, Facts(), {}).beside(torch.sum, torch.ones(3, device="cuda"))
        assert float(loss) == 3.0
    assert made == [0]


class Moving(torch.nn.Module):
    """Its weight, or its buffer, lies elsewhere after each step."""

    def __init__(self, which):
        super().__init__()
        self.which, self.weight = which, torch.nn.Parameter(torch.ones(3))
        self.register_buffer("center", torch.zeros(3))

    def forward(self, x):
        if self.which == "weight":
            self.weight.data = self.weight.data.clamp(-1, 1)
        else:
            self.center = 0.9 * self.center + 0.1 * x
        return ((x - self.center) * self.weight).sum()


def of_a_cpu(model, monkeypatch):
    """A graph's steps where nothing is captured, and how often it was forgotten."""
    graph = StepGraph(torch.optim.SGD(model.parameters(), lr=0.1), Facts(), {}, model=model)
    forgotten = []

    def capture(following, batch, shapes):
        graph.frozen, loss = graph.settings(), following(batch)
        replay = SimpleNamespace(replay=lambda: None)
        graph.recorded[shapes] = SimpleNamespace(graph=replay, batch=batch, loss=loss)

    own = graph.forget
    monkeypatch.setattr(graph, "forget", lambda: (forgotten.append(1), own()))
    monkeypatch.setattr(graph, "beside", lambda following, batch: following(batch))
    monkeypatch.setattr(graph, "capture", capture)
    return graph, forgotten


@pytest.mark.parametrize("which", ["weight", "center"])
def test_what_every_step_puts_elsewhere_is_refused(monkeypatch, which):
    model = Moving(which)
    graph, _ = of_a_cpu(model, monkeypatch)
    if which == "center":  # which a first step might have made
        graph.step(model, torch.ones(3))
    with pytest.raises(Refused, match=f"a step gives '{which}' other memory, which a graph does not follow"):
        graph.step(model, torch.ones(3))


def test_a_weight_that_was_put_elsewhere_between_steps_is_captured_afresh(monkeypatch):
    model = torch.nn.Linear(3, 1)
    graph, forgotten = of_a_cpu(model, monkeypatch)
    for number in range(8):
        if number == 4:
            model.weight.data = model.weight.data.clamp(-0.1, 0.1)
        graph.step(lambda x: model(x).sum(), torch.ones(3))
    assert len(forgotten) == 2  # of which the first step is one


class Scaled(torch.nn.Module):
    """A head, and a buffer that its first step makes."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(3, 1)
        self.register_buffer("scale", None)

    def forward(self, x):
        if self.scale is None:
            self.scale = torch.ones(())
        return (self.head(x) * self.scale).sum()


def other_buffer(model):
    model.scale = torch.tensor(2.0)


def other_part(model):
    model.head = torch.nn.Linear(3, 1)


def other_weight(model):
    model.head.weight = torch.nn.Parameter(torch.ones(1, 3))


@pytest.mark.parametrize("change", [other_buffer, other_part, other_weight])
def test_what_is_replaced_between_steps_is_captured_afresh(monkeypatch, change):
    """A graph would go on with the memory of before."""
    model = Scaled()
    graph, forgotten = of_a_cpu(model, monkeypatch)
    losses = []
    for number in range(8):
        if number == 4:
            assert graph.recorded
            change(model)
        losses.append(float(graph.step(model, torch.ones(3)).detach()))
    assert len(forgotten) == 2  # of which the first step is one
    assert graph.recorded
    assert losses[4] != losses[3]


def test_a_first_step_that_a_loss_scale_skips_leaves_momentum_at_zero():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=True)
    facts = SimpleNamespace(skipped_steps=torch.zeros(()))
    proxy = ScaledOptimizer(SimpleNamespace(optimizer=optimizer, facts=facts))
    proxy.following = optimizer.step
    for found, slope in ((1.0, torch.inf), (0.0, 2.0)):
        weight.grad, proxy.found_inf = torch.full((3,), slope), torch.tensor(found)
        proxy.step()
    assert torch.allclose(weight, torch.full((3,), 0.8))
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], torch.full((3,), 2.0))


def test_dampening_behind_a_loss_scale_is_refused():
    build = build_on_cuda(torch.optim.SGD, momentum=0.9, dampening=0.1)
    build.facts.skipped_steps = 0
    with pytest.raises(Refused, match="fused SGD cannot begin with dampening"):
        CudaGraphStep().apply(build)


def test_it_excludes_compile_modes_that_capture():
    for mode in ("reduce-overhead", "max-autotune"):
        with pytest.raises(vivace.VivaceError, match="exclude each other"):
            vivace.Plan.from_dict({"cuda_graph_step": {}, "compile": {"mode": mode}})
    vivace.Plan.from_dict({"cuda_graph_step": {}, "compile": {"mode": "max-autotune-no-cudagraphs"}})


def test_confirmation_and_gain():
    nothing = Observation({}, {}, 0, 0.0)
    with pytest.raises(vivace.Refused, match="changed nothing"):
        CudaGraphStep().confirm(nothing, nothing)
    profile = Profile("cuda", 0.036, {}, {}, 1000, 0.0, 0, 0)
    _, high = CudaGraphStep.gain(profile, build_on_cuda(torch.optim.Adam).machine)
    assert high == pytest.approx(2.0)


def batches_of(sizes):
    numbers = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 8, generator=numbers), torch.randint(4, (size,), generator=numbers))
        for size in sizes
    ]


def train_steps(job, plan, batches, between=lambda session: None):
    with start(job, Plan.from_dict(plan), inspect()) as session:
        torch.manual_seed(3)
        losses = []
        for batch in batches:
            losses.append(float(session.step(batch)))
            between(session)
        weights = [p.detach().clone() for p in session.build.model.parameters()]
        return losses, weights, session.build.notes | session.build.facts.to_dict()


def without_bias_of_keys(job, *weights):
    """Of a transformer: its gradient is rounding alone, which Adam scales up."""
    names = [key for key, _ in job.model().named_parameters()]
    for side in weights:
        side[names.index("1.self_attn.in_proj_bias")].chunk(3)[1].zero_()


def close(mine, theirs):
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer", "lstm"])
def test_replayed_steps_train_as_steps_do(name):
    job = TINY_JOBS[name]()
    torch.manual_seed(0)
    batches = [batch for _ in range(2) for batch in job.data()]
    losses, weights, _ = train_steps(job, {"fused_optimizer": {}}, batches)
    mine, moved, notes = train_steps(job, GRAPH, batches)
    assert notes["replays"] == len(batches) - WARM_UP_STEPS
    assert mine == pytest.approx(losses, rel=1e-4)
    if name == "transformer":
        without_bias_of_keys(job, moved, weights)
    assert close(moved, weights)


@pytest.mark.gpu
def test_sgd_is_captured_in_its_fused_implementation_without_being_asked():
    job = TINY_JOBS["cnn"]()
    with start(job, Plan.from_dict({"cuda_graph_step": {}}), inspect()) as session:
        assert session.optimizer.param_groups[0]["fused"] is True
        assert not session.optimizer.state_dict()["param_groups"][0]["fused"]
    assert not session.optimizer.param_groups[0]["fused"]


@pytest.mark.gpu
def test_odd_batches_run_uncaptured_and_learning_rates_reach_the_graph():
    job, batches = TINY_JOBS["mlp"](), batches_of([16] * 4 + [7] + [16] * 3)

    def halve(session):
        session.optimizer.param_groups[0]["lr"] *= 0.5

    losses, weights, _ = train_steps(job, {"fused_optimizer": {}}, batches, halve)
    mine, moved, notes = train_steps(job, GRAPH, batches, halve)
    assert notes["replays"] == 7 - WARM_UP_STEPS
    assert mine == pytest.approx(losses, rel=1e-4)
    assert close(moved, weights)


@pytest.mark.gpu
def test_other_settings_that_a_scheduler_changes_are_refused():
    def betas(session):
        group = session.optimizer.param_groups[0]
        group["betas"] = (0.9 * group["betas"][0], 0.999)

    with pytest.raises(Refused, match="more than the learning rate"):
        train_steps(TINY_JOBS["mlp"](), GRAPH, batches_of([16] * 5), betas)


@pytest.mark.gpu
def test_a_step_that_reads_a_number_back_is_refused_and_trains_on():
    def stepwise(model, batch):
        loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        return loss * (2.0 if loss.item() > 1e9 else 1.0)

    job = dataclasses.replace(TINY_JOBS["mlp"](), loss=stepwise)
    wanted = (
        r"(?s)operation not permitted.*test_cuda_graph_step.py, line \d+: return loss \* \(2.0 if loss.item"
    )
    with pytest.raises(Refused, match=wanted):
        train_steps(job, GRAPH, batches_of([16] * 4))


@pytest.mark.gpu
def test_a_shape_that_comes_again_gets_a_graph_of_its_own():
    job, batches = TINY_JOBS["mlp"](), batches_of([16] * 4 + [7] + [16] * 2 + [7, 16, 7, 5, 5, 5])
    losses, weights, _ = train_steps(job, {"fused_optimizer": {}}, batches)
    mine, moved, notes = train_steps(job, GRAPH, batches)
    assert notes["graphs"] == 2
    assert notes["replays"] == (7 - WARM_UP_STEPS) + 2, "of the third shape none"
    assert mine == pytest.approx(losses, rel=1e-4)
    assert close(moved, weights)
    one = GRAPH | {"cuda_graph_step": {"num_shapes": 1}}
    assert train_steps(job, one, batches)[2]["replays"] == 7 - WARM_UP_STEPS


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_loss_scaling_skips_a_step_inside_of_the_graph(name):
    """Among replays one batch overflows float16: no weight moves, and the scale is halved on the device."""
    torch.manual_seed(0)  # of other weights a gradient may be rounding alone, which Adam scales up
    job = TINY_JOBS[name]()
    batches = [batch for _ in range(2) for batch in job.data()]
    if name == "cnn":
        batches[5] = [batches[5][0] * 1e8, batches[5][1]]
    plan = {"fp16_autocast": {}, "fused_optimizer": {}}
    losses, weights, notes = train_steps(job, plan, batches)
    mine, moved, seen = train_steps(job, plan | GRAPH, batches)
    assert seen["replays"] == len(batches) - WARM_UP_STEPS
    assert int(seen["skipped_steps"]) == notes["skipped_steps"] >= (name == "cnn")
    assert mine == pytest.approx(losses, rel=1e-3, nan_ok=True)
    if name == "transformer":
        without_bias_of_keys(job, moved, weights)
    assert close(moved, weights)


@pytest.mark.gpu
def test_micro_batches_and_clipping_are_captured():
    def clip(model):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    job, batches = dataclasses.replace(TINY_JOBS["mlp"](), on_gradients=clip), batches_of([16] * 6)
    plan = {"micro_batches": {"num": 2}, "fused_optimizer": {}}
    losses, weights, _ = train_steps(job, plan, batches)
    mine, moved, notes = train_steps(job, plan | GRAPH, batches)
    assert notes["replays"] == 6 - WARM_UP_STEPS
    assert mine == pytest.approx(losses, rel=1e-4)
    assert close(moved, weights)


@pytest.mark.gpu
def test_replays_draw_new_random_numbers():
    def drawn(model, batch):
        return model(batch[0]).mean() * 0 + torch.rand((), device=batch[0].device)

    job = dataclasses.replace(TINY_JOBS["mlp"](), loss=drawn)
    losses, _, notes = train_steps(job, GRAPH, batches_of([16] * 6))
    assert notes["replays"] == 4
    assert len(set(losses)) == 6


@pytest.mark.gpu
def test_loaded_states_are_what_the_graph_trains_on():
    batches = batches_of([16] * 8)
    with start(TINY_JOBS["mlp"](), Plan.from_dict(GRAPH), inspect()) as session:
        for batch in batches[:4]:
            session.step(batch)
        saved = copy.deepcopy((session.model.state_dict(), session.optimizer.state_dict()))
        first = [float(session.step(batch)) for batch in batches[4:]]
        replays = session.build.facts.replays
        session.model.load_state_dict(saved[0])
        session.optimizer.load_state_dict(saved[1])
        again = [float(session.step(batch)) for batch in batches[4:]]
        assert session.build.facts.replays == replays + 4, "the graph should have been kept"
        state = session.optimizer.state_dict()["state"][0]["step"]
    assert again == first
    assert float(state) == 8


@pytest.mark.gpu
def test_a_state_of_another_form_drops_the_graph():
    batches = batches_of([16] * 5)
    with start(TINY_JOBS["mlp"](), Plan.from_dict(GRAPH), inspect()) as session:
        fresh = copy.deepcopy((session.model.state_dict(), session.optimizer.state_dict()))
        first = [float(session.step(batch)) for batch in batches]
        session.model.load_state_dict(fresh[0])
        session.optimizer.load_state_dict(fresh[1])
        assert [float(session.step(batch)) for batch in batches] == first


@pytest.mark.gpu
def test_precision_and_optimizer_prove_themselves_beside_a_graph():
    """A replay shows no operators; the step beside it does."""
    job, plan = TINY_JOBS["cnn"](), Plan.from_dict(GRAPH | {"bf16_autocast": {}})
    with start(job, Plan(), inspect()) as session:
        reference = observe(session, list(job.data()))
    with start(job, plan, inspect()) as session:
        batches = list(job.data())
        for batch in batches:
            session.step(batch)
        seen = observe(session, batches)
        evidence = {technique.name: technique.confirm(seen, reference) for technique in plan.techniques}
    assert "bfloat16" in evidence["bf16_autocast"]
    assert "_fused_" in evidence["fused_optimizer"]


@pytest.mark.gpu
def test_the_ruler_finds_replays_that_no_longer_reach_the_weights(monkeypatch):
    count = []
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: count.append(1))
    effort = Effort(4, 3, 3, 8, 2, life_seeds=2, pairs=4)
    ruler = Ruler(TINY_JOBS["cnn"](), inspect().to_dict())
    ruler.effort = effort
    monkeypatch.setattr(Effort, "within", lambda seconds, step: effort)
    ruler.prepare()
    verdict = ruler.judge(GRAPH)
    assert not verdict["kept"]
    assert len(count) >= 3 + 6, "lockstep from the later snapshots ran from the graph"


@pytest.mark.gpu
@pytest.mark.parametrize("steps_before", range(WARM_UP_STEPS + 2))
def test_a_session_put_back_to_its_beginning_trains_as_a_new_one(steps_before):
    job, batches = TINY_JOBS["cnn"](), [*TINY_JOBS["cnn"]().data()][:1] * 6
    losses, weights, _ = train_steps(job, {"fused_optimizer": {}}, batches)
    with start(job, Plan.from_dict(GRAPH), inspect()) as session:
        model, optimizer = session.build.model, session.optimizer
        begin = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        for batch in batches[:steps_before]:
            session.step(batch)
        model.load_state_dict(begin[0])
        optimizer.load_state_dict(begin[1])
        assert [float(session.step(batch)) for batch in batches] == pytest.approx(losses, rel=1e-4)
        assert close([p.detach() for p in model.parameters()], weights)


@pytest.mark.gpu
def test_the_contract_holds_a_captured_step():
    assert check(Plan.from_dict({"cuda_graph_step": {}}), "cnn") == ""
    assert check(Plan.from_dict(GRAPH), "mlp") == ""


def test_a_group_without_weights_has_a_rate_too():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([{"params": [], "lr": 0.5}, {"params": [weight]}], lr=0.1)
    graph = StepGraph(optimizer, Facts(), {})
    with graph.rates_on_device():
        assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.5, 0.1])
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
