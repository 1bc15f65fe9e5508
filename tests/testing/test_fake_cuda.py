"""Graph steps, prefetching and flags of GPU techniques, acted out on a CPU."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from vivace.errors import Refused
from vivace.inspection import inspect
from vivace.job import Job
from vivace.observing.observe import observe
from vivace.plan import Plan
from vivace.session.opening import start
from vivace.techniques.untried.cuda_graph_step.graph import WARM_UP_STEPS
from vivace.testing import TINY_JOBS, check
from vivace.testing.fake_cuda import Graph, fake_cuda
from vivace.training.training import train
from vivace.verifying.ruler import Effort, Ruler

GRAPH = {"fused_optimizer": {}, "cuda_graph_step": {}}


@pytest.fixture(autouse=True)
def acted_out(one_thread):
    with fake_cuda():
        yield


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


def close(mine, theirs):
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(mine, theirs, strict=True))


def test_a_capture_trains_nothing_and_a_replay_follows_its_inputs():
    weight, source = torch.ones(3), torch.ones(3)
    graph = Graph()
    with torch.cuda.graph(graph):
        doubled = source * 2
        weight.add_(doubled)
    assert weight.tolist() == [1, 1, 1]
    source.fill_(5)
    graph.replay()
    assert weight.tolist() == [11, 11, 11]
    with pytest.raises(RuntimeError, match="not permitted"), torch.cuda.graph(Graph()):
        source.sum().item()


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer", "lstm"])
def test_replayed_steps_train_as_steps_do(name):
    job = TINY_JOBS[name]()
    torch.manual_seed(0)
    batches = [batch for _ in range(2) for batch in job.data()]
    losses, weights, _ = train_steps(job, {"fused_optimizer": {}}, batches)
    mine, moved, notes = train_steps(job, GRAPH, batches)
    assert notes["replays"] == len(batches) - WARM_UP_STEPS
    assert mine == pytest.approx(losses, rel=1e-4)
    if name == "transformer":  # the gradient of its keys' bias is rounding alone, which Adam scales up
        names = [key for key, _ in job.model().named_parameters()]
        for side in (moved, weights):
            side[names.index("1.self_attn.in_proj_bias")].chunk(3)[1].zero_()
    assert close(moved, weights)


def test_sgd_is_captured_in_its_fused_implementation_without_being_asked():
    job = TINY_JOBS["cnn"]()
    with start(job, Plan.from_dict({"cuda_graph_step": {}}), inspect()) as session:
        assert session.optimizer.param_groups[0]["fused"] is True
        assert not session.optimizer.state_dict()["param_groups"][0]["fused"]
    assert not session.optimizer.param_groups[0]["fused"]


def test_odd_batches_run_uncaptured_and_learning_rates_reach_the_graph():
    job, batches = TINY_JOBS["mlp"](), batches_of([16] * 4 + [7] + [16] * 3)

    def halve(session):
        session.optimizer.param_groups[0]["lr"] *= 0.5

    losses, weights, _ = train_steps(job, {"fused_optimizer": {}}, batches, halve)
    mine, moved, notes = train_steps(job, GRAPH, batches, halve)
    assert notes["replays"] == 7 - WARM_UP_STEPS
    assert mine == pytest.approx(losses, rel=1e-4)
    assert close(moved, weights)


def test_other_settings_that_a_scheduler_changes_are_refused():
    def betas(session):
        group = session.optimizer.param_groups[0]
        group["betas"] = (0.9 * group["betas"][0], 0.999)

    with pytest.raises(Refused, match="more than the learning rate"):
        train_steps(TINY_JOBS["mlp"](), GRAPH, batches_of([16] * 5), betas)


def test_a_step_that_reads_a_number_back_is_refused_and_trains_on():
    def stepwise(model, batch):
        loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        return loss * (2.0 if loss.item() > 1e9 else 1.0)

    job = dataclasses.replace(TINY_JOBS["mlp"](), loss=stepwise)
    wanted = r"operation not permitted.*test_fake_cuda.py, line \d+: return loss \* \(2.0 if loss.item"
    with pytest.raises(Refused, match=wanted):
        train_steps(job, GRAPH, batches_of([16] * 4))


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


@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_loss_scaling_skips_a_step_inside_of_the_graph(name):
    """Among replays one batch overflows float16: no weight moves, and the scale is halved on the device."""
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
    assert close(moved, weights)


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


def test_replays_draw_new_random_numbers():
    job = dataclasses.replace(
        TINY_JOBS["mlp"](), loss=lambda model, batch: model(batch[0]).mean() * 0 + torch.rand(()).sum()
    )
    losses, _, notes = train_steps(job, GRAPH, batches_of([16] * 6))
    assert notes["replays"] == 4
    assert len(set(losses)) == 6


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


def test_a_state_of_another_form_drops_the_graph():
    batches = batches_of([16] * 5)
    with start(TINY_JOBS["mlp"](), Plan.from_dict(GRAPH), inspect()) as session:
        fresh = copy.deepcopy((session.model.state_dict(), session.optimizer.state_dict()))
        first = [float(session.step(batch)) for batch in batches]
        session.model.load_state_dict(fresh[0])
        session.optimizer.load_state_dict(fresh[1])
        assert [float(session.step(batch)) for batch in batches] == first


def test_resumed_training_ends_with_equal_bits(tmp_path):
    job = dataclasses.replace(TINY_JOBS["cnn"](), epochs=2)
    plan = Plan.from_dict(GRAPH | {"pinned_prefetch": {}, "channels_last": {}})
    train(job, plan, out=tmp_path / "whole")
    train(job, plan, out=tmp_path / "parts", max_steps=5)
    train(job, plan, out=tmp_path / "parts", resume=True)
    whole, parts = (torch.load(tmp_path / name / "model.pt") for name in ("whole", "parts"))
    assert all(torch.equal(whole[key], parts[key]) for key in whole)


def test_precision_and_optimizer_prove_themselves_beside_a_graph(monkeypatch):
    """A real replay shows no operators; the step beside it does."""
    job, plan = TINY_JOBS["cnn"](), Plan.from_dict(GRAPH | {"bf16_autocast": {}})
    with start(job, Plan(), inspect()) as session:
        reference = observe(session, list(job.data()))
    with start(job, plan, inspect()) as session:
        batches = list(job.data())
        for batch in batches:
            session.step(batch)
        monkeypatch.setattr(Graph, "replay", lambda graph: None)
        seen = observe(session, batches)
        evidence = {technique.name: technique.confirm(seen, reference) for technique in plan.techniques}
    assert "bfloat16" in evidence["bf16_autocast"]
    assert "_fused_" in evidence["fused_optimizer"]


@pytest.mark.parametrize("stale", [False, True])
def test_the_ruler_judges_replays(stale, monkeypatch):
    """A graph that computes, and one whose replays no longer reach the weights."""
    replay, count = Graph.replay, []

    def counting(graph):
        count.append(1)
        if not stale:
            replay(graph)

    monkeypatch.setattr(Graph, "replay", counting)
    ruler = Ruler(TINY_JOBS["cnn"](), inspect().to_dict())
    ruler.effort = Effort(4, 3, 3, 8, 2, life_seeds=2, pairs=4)
    monkeypatch.setattr(Effort, "within", lambda seconds, step: Effort(4, 3, 3, 8, 2, life_seeds=2, pairs=4))
    ruler.prepare()
    verdict = ruler.judge(GRAPH)
    assert verdict["kept"] is not stale, verdict["reason"]
    assert len(count) >= 3 + 6, "lockstep from the later snapshots ran from the graph"


def test_the_contract_holds_a_captured_step():
    assert check(Plan.from_dict({"cuda_graph_step": {}}), "cnn") == ""
    assert check(Plan.from_dict(GRAPH), "mlp") == ""


def test_batches_come_one_ahead_in_order():
    job = Job(**{**vars(TINY_JOBS["mlp"]()), "data": lambda: batches_of([4, 5, 6])})
    with start(job, Plan.from_dict({"pinned_prefetch": {}}), inspect()) as session:
        seen = [len(batch[0]) for batch in session.batches(job.data())]
    assert seen == [4, 5, 6]
