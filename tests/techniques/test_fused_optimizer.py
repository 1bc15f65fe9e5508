from __future__ import annotations

import copy

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import vivace
from vivace.tensors.optimizers import aligned

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


@pytest.mark.parametrize("kind", ["fused", "foreach"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_trains_the_same_model_up_to_rounding(tiny, name, kind):
    job = tiny("mlp")
    job.make_optimizer = OPTIMIZERS[name]
    assert job.errors({"fused_optimizer": {"kind": kind}})[1] < 1e-4


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_saved_state_is_the_persons_and_close_restores(tiny, name):
    job = tiny("mlp")
    job.make_optimizer = OPTIMIZERS[name]
    plain = job.open({})
    session = job.open({"fused_optimizer": {}})
    for opened in (plain, session):
        opened.step(job.batches[0])
    expected, found = plain.optimizer.state_dict(), session.optimizer.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert [s.keys() for s in found["state"].values()] == [s.keys() for s in expected["state"].values()]
    assert session.optimizer.param_groups[0]["fused"] is True
    session.optimizer.load_state_dict(expected)
    assert session.optimizer.param_groups[0]["fused"] is True, "a loaded checkpoint must not switch it off"
    session.step(job.batches[1])
    session.close()
    assert session.optimizer.param_groups[0]["fused"] == plain.optimizer.param_groups[0]["fused"]
    session.optimizer.step()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, fused=True), "SGD is fused already"),
        (lambda p: torch.optim.RMSprop(p), "RMSprop has no fused"),
        (lambda p: torch.optim.Adam(p, differentiable=True), "Adam cannot run fused here"),
    ],
)
def test_refusals(tiny, make, reason):
    job = tiny("mlp")
    job.make_optimizer = make
    with pytest.raises(vivace.Refused, match=reason):
        job.open({"fused_optimizer": {}})


def test_an_optimizer_that_is_made_from_more_than_its_settings_is_fused_too(tiny):
    class Wider(torch.optim.AdamW):
        def __init__(self, parameters, width, **settings):
            super().__init__(parameters, lr=0.1 / width, **settings)

    job = tiny("mlp")
    job.make_optimizer = lambda p: Wider(p, 16, eps=1e-7)
    of_losses, of_weights = job.errors({"fused_optimizer": {}})
    assert of_losses < 1e-5
    assert of_weights < 1e-4


def test_a_lack_of_memory_is_no_refusal(tiny):
    class Hungry(torch.optim.SGD):
        def step(self, closure=None):
            raise torch.OutOfMemoryError("CUDA out of memory")

    job = tiny("mlp")
    job.make_optimizer = lambda p: Hungry(p, lr=0.1)
    with pytest.raises(torch.OutOfMemoryError):
        job.open({"fused_optimizer": {}})


def test_sparse_gradients_and_own_steps_are_refused():
    model = torch.nn.Embedding(3, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = vivace.Plan.from_dict({"fused_optimizer": {}})
    with pytest.raises(vivace.Refused, match="sparse gradients"):
        vivace.attach(plan, model=model, optimizer=optimizer, loss=lambda m, b: m(b).sum())
    with pytest.raises(vivace.Refused, match="own step"):
        vivace.attach(plan, step=print, models=[model])


@pytest.mark.parametrize("part", [torch.nn.Linear(2, 1), torch.nn.Buffer(torch.ones(8))])
def test_parts_that_are_called_sparse_have_dense_gradients(part):
    model = torch.nn.Linear(3, 2)
    model.sparse = part
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = vivace.Plan.from_dict({"fused_optimizer": {}})
    with vivace.attach(plan, model=model, optimizer=optimizer, loss=lambda m, b: m(b).sum()) as session:
        session.step(torch.ones(4, 3))


class Wrapping(torch.optim.Optimizer):
    """As Accelerate's and Fabric's: built from an optimizer, not from parameters."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def defaults(self):
        return self.optimizer.defaults

    @property
    def param_groups(self):
        return self.optimizer.param_groups


def test_an_optimizer_around_another_one_is_refused_in_words():
    model = torch.nn.Linear(4, 2)
    wrapped = Wrapping(torch.optim.AdamW(model.parameters()))
    plan = vivace.Plan.from_dict({"fused_optimizer": {}})
    with pytest.raises(vivace.Refused, match="Wrapping wraps another optimizer: hand over the one inside"):
        vivace.attach(plan, model=model, optimizer=wrapped, loss=lambda model, batch: model(batch).mean())


def test_a_complex_weight_is_refused_where_no_kernel_takes_it():
    model = torch.nn.Linear(4, 2, dtype=torch.complex64)
    optimizer = torch.optim.AdamW(model.parameters())
    parts = {"model": model, "optimizer": optimizer, "loss": lambda model, batch: model(batch).abs().mean()}
    with pytest.raises(vivace.Refused, match=r"^fused_optimizer: a weight is complex"):
        vivace.attach(vivace.Plan.from_dict({"fused_optimizer": {}}), **parts)
    with vivace.attach(vivace.Plan.from_dict({"fused_optimizer": {"kind": "foreach"}}), **parts) as session:
        session.step(torch.ones(3, 4, dtype=torch.complex64))


@pytest.mark.parametrize("meanwhile", [False, True])
def test_a_state_in_another_memory_order_than_its_weight_is_put_into_it(meanwhile):
    """As of a checkpoint from before the model was laid channels-last: fused kernels walk through memory."""
    weights, saved = [], {}
    for plan in ({}, {"fused_optimizer": {}}):
        torch.manual_seed(0)
        model, images = torch.nn.Conv2d(3, 8, 3), torch.randn(4, 3, 6, 6)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(images).square().mean().backward()
        optimizer.step()
        saved = saved or copy.deepcopy(optimizer.state_dict())
        model.to(memory_format=torch.channels_last)
        plan = vivace.Plan.from_dict(plan)
        loss = lambda model, batch: model(batch).square().mean()  # noqa: E731
        with vivace.attach(plan, model=model, optimizer=optimizer, loss=loss) as session:
            session.step(images)
            if meanwhile:
                optimizer.load_state_dict(copy.deepcopy(saved))
            session.step(images)
        weights.append(model.weight.detach())
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("plan", [{"fused_optimizer": {}}, {"channels_last": {}, "fused_optimizer": {}}])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_in_another_memory_order_than_their_weights_are_read_by_their_indices(name, plan):
    """Such as those that were cut from one vector, or orthogonalised."""

    def project(model):
        for weight in model.parameters():
            weight.grad = 2 * weight.grad.contiguous().mT.contiguous().mT

    weights = []
    for each in ({}, plan):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 6, 3, bias=False), torch.nn.Flatten())
        model.append(torch.nn.Linear(96, 5, bias=False))
        parts = {"model": model, "optimizer": OPTIMIZERS[name](model.parameters()), "on_gradients": project}
        parts["loss"] = lambda model, batch: (model(batch) - 1).square().mean()
        with vivace.attach(vivace.Plan.from_dict(each), **parts) as session:
            for _ in range(2):
                session.step(torch.randn(4, 3, 6, 6))
        weights.append([p.detach() for p in model.parameters()])
    for found, wanted in zip(weights[1], weights[0], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_gradient_that_was_put_in_order_for_a_step_is_the_persons_again_behind_it():
    weight = torch.nn.Parameter(torch.zeros(3, 2))
    weight.grad = own = torch.arange(6.0).view(2, 3).T
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    with aligned([optimizer]):
        optimizer.step()
    assert weight.grad is own
    assert torch.equal(weight.detach(), -own)


def test_a_session_may_be_closed_by_what_runs_behind_a_step():
    """As in a loop that Vivace does not run, where a plan is left behind the update."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = vivace.Plan.from_dict({"fused_optimizer": {}})
    parts = {"model": model, "optimizer": optimizer, "loss": lambda m, x: m(x).square().mean()}
    session = vivace.attach(plan, **parts)
    hook = register_optimizer_step_post_hook(lambda *_: session.close())
    try:
        session.step(torch.ones(4, 3))
    finally:
        hook.remove()
    assert not optimizer.param_groups[0]["fused"]


def test_a_weight_inside_of_a_larger_tensor_is_refused():
    """As of a network for colours that becomes one for grey images; fused kernels change its neighbours."""
    pretrained = torch.nn.Conv2d(3, 8, 3).weight.detach()
    model = torch.nn.Conv2d(1, 8, 3)
    model.weight = torch.nn.Parameter(pretrained[:, :1])

    def opened(kind):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = vivace.Plan.from_dict({"fused_optimizer": {"kind": kind}})
        return vivace.attach(plan, model=model, optimizer=optimizer, loss=lambda m, x: m(x).mean())

    opened("foreach").close()
    with pytest.raises(vivace.Refused, match=r"of the shape \(8, 1, 3, 3\) is a part of a larger tensor"):
        opened("fused")
    model.weight = torch.nn.Parameter(pretrained[:, :1].clone())
    opened("fused").close()


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_weight_that_joins_later_trains_as_without_it(nesterov):
    def trained(plan):
        early, late = (torch.nn.Parameter(torch.full((3,), value)) for value in (1.0, 2.0))
        model = torch.nn.ParameterList([early, late])
        optimizer = torch.optim.SGD(model, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=nesterov)

        def loss(model, number):
            return model[0].square().sum() + (model[1].square().sum() if number else 0.0)

        with vivace.attach(plan, model=model, optimizer=optimizer, loss=loss) as session:
            for number in range(4):
                session.step(number)
        return torch.stack([early.detach(), late.detach()])

    plain, fused = (trained(vivace.Plan.from_dict(plan)) for plan in ({}, {"fused_optimizer": {}}))
    assert torch.allclose(fused, plain, rtol=1e-6)
