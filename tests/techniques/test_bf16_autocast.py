from __future__ import annotations

import copy
import inspect
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import vivace
from vivace.errors import Refused
from vivace.ledger import Observation
from vivace.plan import Plan
from vivace.techniques.bf16_autocast import Bf16Autocast
from vivace.tensors import precision
from vivace.tensors.precision import autocasts_lstm

PLAN = {"bf16_autocast": {}}


@pytest.mark.parametrize("kind", ["cnn", "text", "lstm"])
def test_it_trains_the_same_model_up_to_rounding(tiny, kind):
    if kind == "lstm" and not autocasts_lstm():
        with pytest.raises(Refused, match="cannot run an LSTM under autocast"):
            tiny(kind).errors(PLAN)
        return
    of_losses, of_weights = tiny(kind).errors(PLAN)
    assert 0 < of_losses < 0.02
    assert of_weights < 0.1


def test_an_lstm_is_refused_where_the_processor_cannot_run_it_under_autocast(tiny, monkeypatch):
    before = torch.get_rng_state()
    assert autocasts_lstm() in (True, False)
    assert torch.equal(torch.get_rng_state(), before)
    monkeypatch.setattr(precision, "autocasts_lstm", lambda: False)
    with pytest.raises(Refused, match="use bf16_weights"):
        tiny("lstm").errors(PLAN)
    tiny("lstm").errors({"bf16_weights": {}})


def test_products_run_in_bfloat16_and_the_loss_is_fp32(tiny):
    job = tiny("cnn")
    seen = []
    with job.open(PLAN) as session:
        session.model.head.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
        loss = session.step(job.batches[0])
    assert seen == [torch.bfloat16]
    assert loss.dtype == torch.float32


def test_an_own_step_runs_its_models_in_bfloat16_and_sees_fp32_outputs():
    models = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)]
    inner, outer = [], []
    models[0].register_forward_pre_hook(lambda module, inputs: inner.append(torch.is_autocast_enabled("cpu")))

    def step(batch):
        hidden = models[0](batch)
        outer.append(hidden.dtype)
        loss = models[1](hidden).square().mean()
        loss.backward()
        return loss.detach()

    exact = models[0](torch.ones(2, 4) / 3).detach()
    with vivace.attach(vivace.Plan.from_dict(PLAN), step=step, models=models) as session:
        session.step(torch.ones(2, 4) / 3)
        assert torch.equal(models[0](torch.ones(2, 4) / 3), exact), "outside of a step nothing is patched"
    assert outer == [torch.float32]
    assert all("forward" not in vars(model) for model in models)
    assert not any(inner), "only the forward itself is under autocast"


def test_a_loss_written_out_gets_fp32_and_the_model_can_be_saved_whole(tmp_path):
    model, seen = torch.nn.Linear(4, 3), []

    def loss(model, batch):
        seen.append(model(batch).log_softmax(-1).dtype)  # a CPU's autocast would leave it in bfloat16
        return -model(batch).log_softmax(-1)[:, 0].mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = vivace.Plan.from_dict(PLAN)
    with vivace.attach(plan, model=model, optimizer=optimizer, loss=loss) as session:
        session.step(torch.ones(2, 4))
        torch.save(model, tmp_path / "model.pt")
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        assert torch.equal(loaded(torch.ones(2, 4)), model(torch.ones(2, 4)))
    assert seen == [torch.float32]


def test_confirmation_needs_bfloat16_products():
    nothing = Observation({}, {"float32": 9}, 0, 0.0)
    with pytest.raises(vivace.Refused, match="changed nothing"):
        Bf16Autocast().confirm(nothing, nothing)
    assert "3 of 12" in Bf16Autocast().confirm(
        Observation({}, {"float32": 9, "bfloat16": 3}, 0, 0.0), nothing
    )


class Classes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return nn.functional.log_softmax(self.linear(x), dim=1)


def test_sessions_may_close_in_any_order_and_graphs_can_be_traced_meanwhile():
    own = nn.functional.log_softmax
    half = torch.zeros(1, 3, dtype=torch.bfloat16)

    def opened():
        model = Classes()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return vivace.attach(
            Plan([Bf16Autocast()]), model=model, optimizer=optimizer, loss=lambda m, x: m(x).mean()
        )

    first, second = opened(), opened()
    traced = torch.fx.symbolic_trace(Classes())
    assert "log_softmax" in traced.code
    first.close()
    assert nn.functional.log_softmax(half, dim=1).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert nn.functional.log_softmax(half, dim=1).dtype == torch.float32
    second.close()
    assert nn.functional.log_softmax is own


@pytest.mark.parametrize("name", ["bf16_autocast", "bf16_weights"])
def test_layers_of_ones_own_may_take_and_return_what_they_like(name):
    class Modulated(torch.nn.LayerNorm):
        def forward(self, x, scale, shift=0.0):
            return super().forward(x) * scale + shift, x.mean()

    class Named(torch.nn.Linear):
        def forward(self, hidden):
            return super().forward(hidden)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.last = Named(4, 8), Modulated(8), Named(8, 1)

        def forward(self, x):
            inner, mean = self.norm(self.first(hidden=x), 2.0, shift=1.0)
            return self.last(hidden=inner) + mean

    losses = []
    for plan in ({}, {name: {}}):
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        mean = lambda m, b: m(b).square().mean()  # noqa: E731
        attached = vivace.attach(vivace.Plan.from_dict(plan), model=model, optimizer=optimizer, loss=mean)
        with attached as session:
            losses.append([float(session.step(torch.ones(3, 4))) for _ in range(2)])
    assert losses[1] == pytest.approx(losses[0], rel=0.15)


@pytest.mark.parametrize(
    "plan",
    [PLAN, {"bf16_weights": {}}, {"checkpoint": {}}, {"compress_activations": {}}],
    ids=lambda p: next(iter(p)),
)
def test_a_copy_that_is_made_inside_of_a_step_has_its_own_weights(plan):
    """Such as a target network, which an own step copies from the trained one from time to time."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(6)))
    optimizer, copies = torch.optim.SGD(model.parameters(), lr=0.5), []
    inputs = torch.randn(3, 4)

    def step(batch):
        copies.append(copy.deepcopy(model))
        loss = (model(batch) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    before = model(inputs)
    with vivace.attach(Plan.from_dict(plan), step=step, models=[model]) as session:
        for _ in range(3):
            session.step(inputs)
    assert torch.equal(copies[0](inputs), before)
    assert not torch.allclose(model(inputs), before, rtol=0.05)


def test_a_norm_in_float64_stays_so_and_may_be_given_its_input_by_name():
    class Norm(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm = nn.Linear(4, 8), Norm(8)
            self.exact, self.last = nn.LayerNorm(8, dtype=torch.float64), nn.Linear(8, 1, dtype=torch.float64)

        def forward(self, x):
            return self.last(self.exact(self.norm(x=self.first(x)).double()))

    losses = []
    for plan in ({}, PLAN, {"bf16_weights": {}}):
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        attached = vivace.attach(
            Plan.from_dict(plan), model=model, optimizer=optimizer, loss=lambda m, b: m(b).square().mean()
        )
        with attached as session:
            losses.append(float(session.step(torch.ones(3, 4))))
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=0.1)


FORMS = {
    "namespace": lambda y: SimpleNamespace(found=y),
    "inside": lambda y: SimpleNamespace(found=y, more=[SimpleNamespace(found=y)], unit=None),
    "distribution": lambda y: torch.distributions.Independent(torch.distributions.Normal(y, y.exp()), 1),
}


def inside_of(form, found):
    if form == "distribution":
        return [found.base_dist.loc, found.base_dist.scale, found.log_prob(torch.zeros(()))]
    return [found.found, *(one.found for one in vars(found).get("more", ()))]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["bf16_autocast", "bf16_weights", "fp16_autocast"])
def test_outputs_in_namespaces_and_distributions_are_in_fp32_again(name, form):
    class Model(nn.Linear):
        def forward(self, x):
            made.append(FORMS[form](super().forward(x)))
            return made[-1]

    def loss(model, batch):
        seen.extend(one.dtype for one in inside_of(form, model(batch)))
        return inside_of(form, model(batch))[-1].square().mean()

    made, seen, model = [], [], Model(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with vivace.attach(Plan.from_dict({name: {}}), model=model, optimizer=optimizer, loss=loss) as session:
        session.step(torch.ones(2, 4))
    assert set(seen) == {torch.float32}
    assert inside_of(form, made[0])[0].dtype != torch.float32, "what the model made stays as it is"


class Cache:
    """Keys and values of former calls, as of a model for texts that goes on from them."""

    def __init__(self):
        self.values = []


@pytest.mark.parametrize("name", ["bf16_autocast", "bf16_weights"])
def test_a_cache_that_goes_into_the_model_again_stays_as_it_is(name):
    class Model(nn.Linear):
        def forward(self, x, cache):
            cache.values.append(super().forward(x))
            return torch.cat(cache.values).float(), cache

    def loss(model, batch):
        cache = given = Cache()
        for _ in range(2):
            found, cache = model(batch, cache)
            assert cache is given
        return found.square().mean()

    model = Model(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with vivace.attach(Plan.from_dict({name: {}}), model=model, optimizer=optimizer, loss=loss) as session:
        session.step(torch.ones(2, 4))


def test_an_answer_without_numbers_in_sixteen_bits_is_the_models_own():
    answers, kept = [], SimpleNamespace(count=3)

    class Model(nn.Linear):
        def forward(self, x):
            return super().forward(x), kept

    def loss(model, batch):
        found, answer = model(batch)
        answers.append(answer)
        return found.mean()

    model = Model(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with vivace.attach(Plan.from_dict(PLAN), model=model, optimizer=optimizer, loss=loss) as session:
        session.step(torch.ones(2, 4))
    assert answers[0] is kept


@pytest.mark.parametrize("compiled", [{}, {"compile": {}}], ids=["eager", "compiled"])
def test_a_call_for_which_the_person_turned_autocast_off_is_in_fp32(compiled):
    """Such as the one whose outputs are the aim of another."""
    model, seen = torch.nn.Sequential(torch.nn.Linear(4, 3)), []
    model[0].register_forward_hook(lambda module, inputs, outputs: seen.append(outputs.dtype))

    def loss(model, batch):
        with torch.autocast("cpu", enabled=False):
            aim = model(batch)
        return (model(batch) - aim.detach()).square().mean()

    attached = vivace.attach(
        vivace.Plan.from_dict(PLAN | compiled),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=loss,
    )
    with attached as session:
        assert session.step(torch.randn(8, 4)) > 0, "rounding alone"
    assert seen == [torch.float32, torch.bfloat16]


def test_weights_that_the_loss_has_changed_are_those_that_are_used():
    """As adversarial training does it with weights, between two calls of the model."""
    model, seen = nn.Linear(4, 4, bias=False), []

    def loss(model, batch):
        clean = model(batch).square().mean()
        (gradient,) = torch.autograd.grad(clean, [model.weight])
        with torch.no_grad():
            model.weight.add_(gradient.sign())
        changed = model(batch).square().mean()
        seen.append((float(clean.detach()), float(changed.detach())))
        return changed

    batch, before = torch.randn(8, 4), model.weight.detach().clone()
    loss(model, batch)
    with torch.no_grad():
        model.weight.copy_(before)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with vivace.attach(Plan.from_dict(PLAN), model=model, optimizer=optimizer, loss=loss) as session:
        session.step(batch)
    assert seen[1] == pytest.approx(seen[0], rel=0.02)


@pytest.mark.parametrize("plan", [PLAN, {"bf16_weights": {}}])
def test_a_model_can_be_asked_for_its_arguments_in_a_step(plan):
    """As Hugging Face's `generate` does it."""

    class Asking(nn.Sequential):
        def forward(self, tokens, attention_mask=None):
            return super().forward(tokens)

    model, asked = Asking(nn.Linear(4, 4)), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model, batch):
        asked.append(list(inspect.signature(model.forward).parameters))
        return model(batch).mean()

    with vivace.attach(Plan.from_dict(plan), model=model, optimizer=optimizer, loss=loss) as session:
        session.step(torch.randn(3, 4))
    assert asked == [["tokens", "attention_mask"]]


def test_weights_that_were_made_in_inference_mode_may_be_part_of_a_model():
    with torch.inference_mode():
        teacher = nn.Linear(4, 4)

    class Taught(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                aim = self.teacher(x)
            return super().forward(x) - aim

    model = Taught(4, 4)
    model.teacher = teacher
    optimizer = torch.optim.SGD(nn.Linear.parameters(model, recurse=False), lr=0.1)
    loss = lambda model, batch: model(batch).square().mean()  # noqa: E731
    with vivace.attach(Plan.from_dict(PLAN), model=model, optimizer=optimizer, loss=loss) as session:
        assert session.step(torch.randn(8, 4)) > 0
