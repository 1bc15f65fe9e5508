"""Loops that call a method of a model, or parts that one method calls, in the place of the model."""

import logging
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from vivace.inspection import inspect
from vivace.live import loop as loop_module
from vivace.live.hosted import Hosted
from vivace.live.methods import Methods
from vivace.live.refusals import Seen
from vivace.plan import Plan
from vivace.technique import Stage

STEPS = 150
LOG = logging.getLogger(__name__)


class Parts(nn.Module):
    """Called by its methods alone."""

    evaluated: list[bool]

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Conv2d(3, 8, 3), nn.Linear(8 * 36, 4)

    def encode(self, inputs):
        return F.relu(self.encoder(inputs)).flatten(1)

    def loss(self, inputs):
        return F.cross_entropy(self.decoder(self.encode(inputs)), torch.arange(6) % 4)

    def logged(self, inputs):
        LOG.debug("a step")
        return self.loss(inputs)

    def learn(self, inputs, optimizer):
        optimizer.zero_grad()
        self.loss(inputs).backward()
        optimizer.step()


class Warns(Parts):
    def loss(self, inputs):
        if not hasattr(self, "trainer"):
            warnings.warn("it is nobody's", stacklevel=1)
        return super().loss(inputs)

    def __getstate__(self):
        return {name: value for name, value in super().__getstate__().items() if name != "trainer"}


def trained(step, make=Parts, evaluate=lambda model: None):
    def train():
        torch.manual_seed(0)
        model = make()
        model.trainer = object()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for number in range(STEPS):
            inputs = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(number))
            optimizer.zero_grad()
            step(model, inputs, optimizer)
            optimizer.step()
            if number % 10 == 0:
                model.eval()
                evaluate(model)
                model.train()
        return model

    return train


def by_loss(model, inputs, _):
    model.loss(inputs).backward()


def by_parts(model, inputs, _):
    F.cross_entropy(model.decoder(model.encode(inputs)), torch.arange(6) % 4).backward()


@pytest.mark.parametrize("make", [Parts, Warns])
def test_a_method_that_calls_the_parts_is_led(led, make, recwarn):
    acting = []

    def evaluate(model):
        conductor = watching[0].conductor
        build = conductor._acting if conductor is not None else None
        acting.append(build is not None and any(t.card.stage != Stage.PROCESS for t in build.plan.techniques))

    watching = []
    install = loop_module.Loop.install

    def installed(self):
        watching.append(self)
        install(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop_module.Loop, "install", installed)
        found, model, told = led(trained(by_loss, make, evaluate), "bf16_autocast")
    assert not told["only_the_rest"]
    assert "bf16_autocast" in told["plan"], told
    assert told["watched"] >= 1
    assert not found.problems
    assert not any(acting)  # an evaluation is the script's own
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert "nobody's" not in str([warning.message for warning in recwarn])
    assert make.loss is vars(make)["loss"]


def test_what_is_adopted_acts_on_the_parts_that_the_method_calls(led):
    lowered = []

    class Noting(nn.Linear):
        def forward(self, inputs):
            outputs = super().forward(inputs)
            lowered.append(outputs.dtype == torch.bfloat16)
            return outputs

    class Net(Parts):
        def __init__(self):
            super().__init__()
            self.decoder = Noting(8 * 36, 4)

    _, _, told = led(trained(by_loss, Net), "bf16_autocast")
    assert "bf16_autocast" in told["plan"], told
    assert lowered[-1]


def test_a_part_that_the_method_freezes_at_each_step_is_no_evaluation(led):
    class Frozen(Parts):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))

        def loss(self, inputs):
            self.encoder[1].eval()
            return super().loss(inputs)

    found, _, told = led(trained(by_loss, Frozen), "fused_optimizer")
    assert list(told["plan"]) == ["fused_optimizer"], told
    assert not found.problems


def test_each_part_that_the_method_calls_is_compiled(monkeypatch):
    compiled = []

    def instead(function, **_):
        def run(*inputs):
            compiled.append(function)
            return function(*inputs)

        return run

    monkeypatch.setattr(torch, "compile", instead)
    model = Parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan.from_dict({"compile": {}})
    hosted = Hosted(plan, model, optimizer, inspect(), parts=("encoder", "decoder"), may_compile=True)
    hosted.call(model.loss, (torch.randn(6, 3, 8, 8),), {})
    hosted.close()
    assert len(compiled) == 2


def test_a_precision_that_changes_no_number_is_not_adopted(led):
    class Own(nn.Module):
        """Has its products outside of autocast."""

        def __init__(self):
            super().__init__()
            self.model = whole()

        def forward(self, inputs):
            with torch.autocast("cpu", enabled=False):
                return self.model(inputs)

    _, _, told = led(trained(by_call, Own), "bf16_autocast")
    assert "bf16_autocast" not in told["plan"]
    reasons = [entry["verdict"]["reason"] for entry in told["tried"] if "bf16_autocast" in entry["plan"]]
    assert any(reason.startswith("it changed nothing") for reason in reasons), told["tried"]


def test_of_parts_within_parts_the_outer_ones_are_led():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    seen = Seen(calls=3, backwards=1)
    seen.methods.owners[id(model), "extend"] = model
    for part in (model[0][1], model[0], model[1]):
        seen.roots[id(part)] = part
    assert seen.led_by_method().parts == ("0", "1")
    seen.roots[id(model)] = model
    assert seen.led_by_method().parts == ("",)


def test_without_a_plan_that_acts_the_results_are_equal(led):
    torch.use_deterministic_algorithms(True)
    try:
        _, mine, told = led(trained(by_loss))
        theirs = trained(by_loss)()
    finally:
        torch.use_deterministic_algorithms(False)
    assert not told["plan"]
    pairs = zip(mine.state_dict().values(), theirs.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def whole():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))


def by_call(model, inputs, _):
    F.cross_entropy(model(inputs), torch.arange(6) % 4).backward()


def logged(model, inputs, _):
    model.logged(inputs).backward()


def learning(model, inputs, optimizer):
    model.learn(inputs, optimizer)


@pytest.mark.parametrize("step", [by_parts, logged, learning])
def test_what_no_silent_method_holds_is_not_led(led, step):
    """A part without a method, one that logs, and one that updates itself: its update may be led."""
    found, _, told = led(trained(step), "fused_optimizer", "host_allocator")
    assert "parts of one" in told["only_the_rest"]
    assert not found.problems


def test_parts_that_are_run_again_in_a_backward_pass_are_no_models_of_their_own(led):
    class Checkpointed(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, inputs):
            return checkpoint(self.model, inputs, use_reentrant=False)

    _, _, told = led(trained(by_call, lambda: Checkpointed(whole())), "bf16_autocast")
    assert not told["only_the_rest"]
    assert "bf16_autocast" in told["plan"], told


def test_a_copy_that_fails_leaves_the_rest(led):
    class Attached(nn.Sequential):
        """Runs only where it was made."""

        def forward(self, inputs):
            if id(self) != self[-1].home:
                raise RuntimeError("not attached")
            return super().forward(inputs)

    def attached():
        model = Attached(*whole())
        model[-1].home = id(model)
        return model

    found, _, told = led(trained(by_call, attached), "fused_optimizer")
    assert "a copy of its model fails: RuntimeError: not attached" in told["only_the_rest"]
    assert list(told["plan"]) == ["fused_optimizer"]
    assert not found.problems


def test_a_function_outside_of_any_module_makes_the_calls():
    methods = Methods()
    methods.called(nn.Linear(1, 1))
    assert methods.only() is None
