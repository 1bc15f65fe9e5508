import pytest
import torch
from torch.utils.checkpoint import checkpoint

import vivace
from vivace.ledger import Observation
from vivace.observing.observe import observe
from vivace.technique import registry
from vivace.testing import TechniqueContract

from . import blocky

OptimizerInBackward = registry.find("optimizer_in_backward")
PLAN = {"optimizer_in_backward": {}}


@pytest.mark.usefixtures("one_thread")
class TestOptimizerInBackward(TechniqueContract):
    technique = OptimizerInBackward


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
        lambda p: torch.optim.AdamW(list(p), lr=1e-2, amsgrad=True),
        lambda p: torch.optim.Adam([{"params": [q], "lr": 0.01 / (i + 1)} for i, q in enumerate(p)]),
    ],
    ids=["sgd", "adamw", "groups"],
)
@pytest.mark.parametrize(
    "beside", [{}, {"micro_batches": {"num": 4}}, {"checkpoint": {}}, {"bf16_autocast": {}}]
)
def test_no_bit_differs(make, beside):
    seen, notes = blocky.course({**beside, **PLAN}, make=make, see=False)
    wanted, _ = blocky.course(beside, make=make, see=False)
    assert blocky.differing(seen, wanted) == []
    assert notes["updates_in_backward"] == 3 * len(list(blocky.ORIGINAL.parameters()))


def test_schedulers_see_their_optimizer_step_and_frozen_parameters_stay():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    with blocky.opened(PLAN, model, loss=lambda m, x: m(x).mean()) as session:
        scheduler = torch.optim.lr_scheduler.StepLR(session.optimizer, 1)
        session.step(torch.ones(2, 4))
        scheduler.step()  # warns where the optimizer did not step
    assert torch.equal(model[0].weight, before)
    assert not model[1].weight._post_accumulate_grad_hooks


def test_the_peak_falls_by_the_gradients():
    peaks = []
    for plan in ({}, PLAN):
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
        with blocky.opened(plan, model, loss=lambda m, x: m(x).mean()) as session:
            peaks.append(observe(session, [torch.ones(2, 256)]).peak_bytes)
    assert peaks[0] - peaks[1] > 6 * 256 * 256 * 4


class OwnOptimizer(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"on_gradients": lambda model: None}, "on_gradients wants to see all gradients"),
        ({"make": lambda p: OwnOptimizer(p, lr=0.1)}, "OwnOptimizer may look at all parameters at once"),
        ({"make": lambda p: torch.optim.LBFGS(p)}, "LBFGS may look at all parameters at once"),
        (
            {"make": lambda p: torch.optim.SGD([*p, torch.zeros(1, requires_grad=True)], lr=0.1)},
            "the optimizer updates tensors outside of the model",
        ),
    ],
)
def test_what_needs_all_gradients_at_once_is_refused(more, reason):
    with pytest.raises(vivace.Refused, match=f"^optimizer_in_backward: {reason}"):
        blocky.opened(PLAN, **more)


def test_loss_scaling_and_step_hooks_are_refused():
    with pytest.raises(vivace.Refused, match="fp16 loss scaling judges all gradients first"):
        blocky.opened({**PLAN, "fp16_autocast": {}})

    def make(parameters):
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer

    with pytest.raises(vivace.Refused, match="SGD has hooks that wait for a whole step"):
        blocky.opened(PLAN, make=make)


def test_gradients_of_gradients_are_refused_by_name():
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

    model = Twice()

    def loss(model, batch):
        inner = (model.weight**3).sum()
        torch.autograd.backward(inner, create_graph=True)
        return inner

    with (
        blocky.opened(PLAN, model, loss=loss) as session,
        pytest.raises(vivace.Refused, match=r"^optimizer_in_backward: .*gradients of gradients"),
    ):
        session.step(torch.ones(1))


class ReadTwice(torch.nn.Module):
    """Its head's weight once more as `read` gives it, in front of the head (`early`) or behind it."""

    def __init__(self, read, early):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.read, self.early = read, early

    def forward(self, x):
        x = self.body(x)
        without = x if self.early else self.head(x)
        beside = torch.nn.functional.linear(without, self.read(self.head.weight))
        return beside + torch.tanh(self.head(x)) if self.early else beside


@pytest.mark.parametrize("more", [{}, {"micro_batches": {"num": 2}}])
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("read", [lambda w: w.data, lambda w: w.detach()], ids=["data", "detach"])
def test_a_weight_that_is_read_without_its_graph_is_updated_when_nothing_reads_it_any_more(read, early, more):
    found = []
    for plan in (more, {**more, **PLAN}):
        model = ReadTwice(read, early)
        with blocky.opened(plan, model, loss=lambda m, x: m(x).square().mean()) as session:
            for step in range(3):
                session.step(torch.randn(4, 8, generator=torch.Generator().manual_seed(step)))
            updates = session.build.facts.updates_in_backward
        found.append([weight.detach().clone() for weight in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    # In the first step one weight waits, and later where it was needed behind its gradient.
    assert updates == (12 - 3 if early else 12 - 1)


class SavesView(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight.detach().t())
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, turned = ctx.saved_tensors
        return grad @ turned.t(), grad.t() @ x


def test_a_weight_that_is_read_before_its_gradient_is_there_does_not_wait():
    model = torch.nn.Linear(4, 4, bias=False)
    with blocky.opened(PLAN, model, loss=lambda m, x: SavesView.apply(x, m.weight).mean()) as session:
        for _ in range(3):
            session.step(torch.ones(2, 4))
        assert session.build.facts.updates_in_backward == 2


def test_confirmation_counts_the_updates():
    seen = Observation({}, {}, 0, 0.0, facts={"updates_in_backward": 12})
    assert OptimizerInBackward().confirm(seen, seen) == "12 updates of parameters inside the backward pass"
    with pytest.raises(vivace.Refused, match="changed nothing"):
        OptimizerInBackward().confirm(Observation({}, {}, 0, 0.0), seen)


def test_a_gradient_in_parts_is_refused_by_name():
    """Reentrant checkpoints of one layer are backward passes of their own, each with a part of it."""

    def loss(model, batch):
        for _ in range(2):
            batch = checkpoint(lambda x: torch.tanh(model(x)), batch, use_reentrant=True)
        return batch.square().mean()

    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attached = vivace.attach(
        vivace.Plan.from_dict({"optimizer_in_backward": {}}), model=model, optimizer=optimizer, loss=loss
    )
    with (
        attached as session,
        pytest.raises(vivace.Refused, match=r"^optimizer_in_backward: .*comes in parts"),
    ):
        session.step(torch.ones(2, 4, requires_grad=True))


def test_weights_that_are_unfrozen_later_are_trained():
    """No hook waits for them."""

    def weights(plan):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        attached = vivace.attach(
            vivace.Plan.from_dict(plan),
            model=model,
            optimizer=optimizer,
            loss=lambda m, b: m(b).square().mean(),
        )
        with attached as session:
            for _ in range(2):
                for step in range(2):
                    session.step(torch.ones(3, 4) + step)
                model[0].requires_grad_(True)
        return model.state_dict()

    wanted, found = weights({}), weights({"optimizer_in_backward": {}})
    assert all(torch.equal(weight, found[name]) for name, weight in wanted.items())


def test_a_backward_pass_between_steps_updates_nothing():
    """Such as that of a metric that differentiates."""
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = vivace.Plan.from_dict(PLAN)
    inputs, before = torch.randn(4, 3), model.weight.detach().clone()

    def loss(model, batch):
        return model(batch).square().mean()

    with vivace.attach(plan, model=model, optimizer=optimizer, loss=loss) as session:
        loss(model, inputs).backward()
        assert torch.equal(model.weight, before)
        session.step(inputs)
        assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("name", ["optimizer_in_backward", "ddp"])
def test_a_model_that_exchanges_its_gradients_itself_is_refused(name, tmp_path):
    """Each rank would update its weights by its own gradients; or exchange them twice."""
    where = f"file://{tmp_path}/group"
    torch.distributed.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        with pytest.raises(vivace.Refused, match=f"^{name}: .*exchange"):
            blocky.opened({name: {}}, model, loss=lambda m, b: m(b).mean())
    finally:
        torch.distributed.destroy_process_group()
