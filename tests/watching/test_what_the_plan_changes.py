"""What a plan changes between two steps is found, whatever the job's own code may change there, too."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

import vivace
from vivace import Seam
from vivace.errors import PromiseBroken
from vivace.watching.written import Code, code_of_optimizers

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def stopped(plant, watched):
    """``(job, change)``: what the run says when `change(build)` is made at the second epoch's beginning."""

    def run(job, change):
        def apply(build, count):
            def batches(following, loader):
                if count.steps:
                    change(build)
                return following(loader)

            build.wrap(Seam.BATCHES, batches)

        with pytest.raises(PromiseBroken) as caught:
            watched(job, plant(apply))
        return str(caught.value)

    return run


def no_decay(build):
    for group in build.optimizer.param_groups:
        group["weight_decay"] = 0.0


def slower(build):
    for group in build.optimizer.param_groups:
        group["lr"] *= 0.5


def freeze(build):
    for parameter in build.model[0].parameters():
        parameter.requires_grad_(False)


def no_dropout(build):
    build.model[3].p = 0.0


class Own(torch.optim.SGD):
    """Its learning rate is the job's, and another setting its own."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize(("change", "name"), [(no_decay, "weight_decay"), (slower, "lr")])
def test_settings_of_an_optimizer_that_is_not_torchs(stopped, dropping, change, name):
    job = dropping(optimizer=lambda model: Own(model.parameters(), lr=0.05, weight_decay=1e-3), epochs=2)
    assert f"step 5 does not train the same model: {name} of" in stopped(job, change)


class Adapting(torch.optim.Optimizer):
    def __init__(self, params, held=None):
        super().__init__(params, {"lr": 0.1, "eps": 1e-8, "k": 0, "d": 1.0, "low": 0, "high": 0, "r": 0.0})
        self.held = held

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            group["d"] = group["lr"] * group.get("eps", 1.0)
            for bound in ("low", "high"):
                group[bound] = group["k"]
            self.adapt(group["r"])

    def adapt(self, number):
        self.state["number"] = number


def test_what_an_optimizer_may_set_is_read_from_its_code():
    weight = nn.Parameter(torch.zeros(1))

    def names(optimizer):
        return code_of_optimizers([optimizer]).items & optimizer.param_groups[0].keys()

    assert names(torch.optim.Adam([weight])) == set()
    assert names(Adapting([weight])) == {"k", "d", "low", "high"}
    outer = Own([weight], lr=0.1)
    outer.held = Adapting([weight])
    assert code_of_optimizers([outer]).items >= {"count", "k", "d"}


class Remembering:
    """A factor of a learning rate that keeps what it was asked last."""

    def __init__(self):
        self.last, self.seen = 0, {}

    def __call__(self, epoch):
        self.last = self.seen[epoch] = 1.0 / (1 + epoch)
        return self.last


def test_a_schedules_function_that_writes_only_what_is_its_own(stopped, dropping):
    job = dropping(scheduler=lambda optimizer: LambdaLR(optimizer, Remembering()), epochs=2)
    assert "step 5 does not train the same model: weight_decay of" in stopped(job, no_decay)


def penalized(model, batch):
    inputs = batch[0].clone().requires_grad_()
    loss = functional.cross_entropy(model(inputs), batch[1])
    (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
    return loss + slope.square().sum()


def test_frozen_weights_beside_a_loss_that_lets_its_inputs_have_gradients(stopped, dropping):
    job = dropping(loss=penalized, epochs=2)
    assert "step 5 does not train the same model: requires_grad of" in stopped(job, freeze)


def test_where_nobody_knows_who_froze_a_weight_the_run_goes_on_unwatched(watched, dropping):
    def metric(model, batches):
        model[0].requires_grad_(False)
        return -sum(float(functional.cross_entropy(model(x), y)) for x, y in batches)

    run = watched(dropping(metric=metric, epochs=2), vivace.Plan.from_dict({"bf16_autocast": {}}))
    assert run.watched["broken_steps"] == []
    assert "0.weight trains no more, and the job's own code may freeze weights" in run.watched["sentence"]


def thawing(weight, how):
    weight.requires_grad_()
    weight.requires_grad_(True)
    weight.requires_grad = True


def freezing(weight, how):
    weight.requires_grad_(False)


def freezing_by_name(weight, how):
    weight.requires_grad = False


def turning(weight, how):
    weight.requires_grad_(how)


def test_which_code_may_freeze():
    codes = [Code([function]) for function in (thawing, freezing, freezing_by_name, turning)]
    assert [code.may_thaw for code in codes] == [True] * 4
    assert [code.may_freeze for code in codes] == [False, True, True, True]


class Storing(nn.Sequential):
    def forward(self, inputs):
        setattr(self, "last", SimpleNamespace(size=len(inputs)))  # noqa: B010
        return super().forward(inputs)


def test_settings_of_torchs_modules_in_a_model_that_sets_attributes_by_name(stopped, dropping):
    job = dropping(model=lambda: Storing(*dropping().model()), epochs=2)
    assert "step 5 does not train the same model: p of 3 (Dropout)" in stopped(job, no_dropout)
