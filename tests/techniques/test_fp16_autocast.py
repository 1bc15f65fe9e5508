from __future__ import annotations

import pytest
import torch

import vivace
from vivace.machine import Device
from vivace.technique.registry import find
from vivace.testing.contract import plain_profile

PLAN = {"fp16_autocast": {"initial_scale": 256.0}}


@pytest.mark.parametrize("kind", ["cnn", "text"])
def test_it_trains_the_same_model_up_to_rounding(tiny, kind):
    of_losses, of_weights = tiny(kind).errors(PLAN)
    assert 0 < of_losses < 0.01
    assert of_weights < 0.02


def test_clipping_sees_true_gradients(tiny):
    job = tiny("mlp")
    norms = []

    def clip(model):
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)))

    for plan in ({}, PLAN, {**PLAN, "micro_batches": {"num": 2}}):
        job.train(plan, on_gradients=clip)
    assert norms[4:8] == pytest.approx(norms[:4], rel=0.01)
    assert norms[8:] == pytest.approx(norms[:4], rel=0.01)


def test_an_overflow_skips_the_step_and_backs_off(tiny):
    job = tiny("mlp")
    with job.open({"fp16_autocast": {"initial_scale": 2.0**40}}) as session:
        before = {key: value.clone() for key, value in session.model.state_dict().items()}
        session.step(job.batches[0])
        assert session.build.facts.skipped_steps == 1
        assert all(torch.equal(before[key], value) for key, value in session.model.state_dict().items())
        assert not session.optimizer.state
        assert all(parameter.grad is None for parameter in session.model.parameters())
        assert session.build.kept["fp16_autocast"].get_scale() == 2.0**39
        for _ in range(40):
            session.step(job.batches[0])
        assert 1 < session.build.facts.skipped_steps < 41
        assert not all(torch.equal(before[key], value) for key, value in session.model.state_dict().items())


def test_the_scale_grows_and_is_kept_for_checkpoints(tiny):
    job = tiny("mlp")
    with job.open({"fp16_autocast": {"initial_scale": 4.0, "growth_interval": 2}}) as session:
        for batch in job.batches:
            session.step(batch)
        state = session.build.kept["fp16_autocast"].state_dict()
    assert state["scale"] == 16.0


def test_settings_are_validated():
    with pytest.raises(vivace.VivaceError, match="growth_interval"):
        vivace.Plan.from_dict({"fp16_autocast": {"growth_interval": 0}})


def test_an_own_step_is_refused():
    with pytest.raises(vivace.Refused, match="own step"):
        vivace.attach(vivace.Plan.from_dict(PLAN), step=print, models=[torch.nn.Linear(1, 1)])


def test_an_lstm_on_a_cpu_is_refused(tiny):
    with pytest.raises(vivace.Refused, match="LSTM in float16"):
        tiny("lstm").open(PLAN)


def test_bfloat16_comes_first_where_a_gpu_runs_both_at_one_rate():
    """Loss scaling costs something, and may skip steps."""
    machine = vivace.Machine((Device("cuda", "a card", 1, ("sm_90",)),), 1, {}, {})
    profile = plain_profile()
    fp16, bf16 = (find(name).gain(profile, machine) for name in ("fp16_autocast", "bf16_autocast"))
    assert bf16[1] > fp16[1]


def test_gradients_that_would_stay_scaled_are_refused():
    """Clipping would see them, 65,536 times too large, and leave nothing of the others."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)

    def opened():
        plan = vivace.Plan.from_dict(PLAN)
        return vivace.attach(plan, model=model, optimizer=optimizer, loss=lambda m, x: m(x).mean())

    with pytest.raises(vivace.Refused, match=r"fp16_autocast: the optimizer leaves out '0\.weight'"):
        opened()
    model[0].requires_grad_(False)
    opened().close()


def test_complex_weights_are_refused():
    model = torch.nn.ParameterList([torch.ones(2), torch.ones(2, dtype=torch.complex64)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(vivace.Refused, match="fp16_autocast: a weight is complex"):
        vivace.attach(vivace.Plan.from_dict(PLAN), model=model, optimizer=optimizer, loss=torch.add)


def test_a_step_that_failed_behind_its_gradients_stops_no_later_one(tiny):
    job, calls = tiny("mlp"), []

    def fails_once(model):
        calls.append(float(torch.nn.utils.get_total_norm(p.grad for p in model.parameters())))
        if len(calls) == 1:
            raise RuntimeError("no more memory")

    with job.open(PLAN, on_gradients=fails_once) as session:
        with pytest.raises(RuntimeError, match="no more memory"):
            session.step(job.batches[0])
        session.step(job.batches[0])
        session.step(job.batches[1])
    assert calls[1] == pytest.approx(calls[0], rel=1e-3)
    assert session.build.facts.skipped_steps == 0


def test_weights_that_are_trained_in_float16_are_refused():
    """torch would raise at the first step: their gradients are not unscaled."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1).half())
    with pytest.raises(vivace.Refused, match=r"^fp16_autocast: the weight '1.weight' is in float16"):
        vivace.attach(
            vivace.Plan.from_dict(PLAN),
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loss=lambda m, b: m(b).mean(),
        )


@pytest.mark.parametrize("kind", ["weight", "later", "module"])
def test_hooks_that_would_see_scaled_gradients_are_refused(kind):
    """As those that clip each weight's gradient: scaled by thousands, all would be clipped."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    if kind == "weight":
        model[0].bias.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    elif kind == "later":
        model[0].bias.register_post_accumulate_grad_hook(lambda weight: weight.grad.clamp_(-0.1, 0.1))
    else:
        model[0].register_full_backward_hook(
            lambda module, inner, outer: tuple(g.clamp(-1, 1) for g in inner)
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    place = "0" if kind == "module" else "0.bias"
    with pytest.raises(
        vivace.Refused, match=f"a hook of yours on '{place}' would see gradients that are scaled"
    ):
        vivace.attach(
            vivace.Plan.from_dict(PLAN), model=model, optimizer=optimizer, loss=lambda m, b: m(b).mean()
        )
