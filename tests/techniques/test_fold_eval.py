"""fold_eval: in evaluation without gradients, and nowhere else; never out of date."""

import copy
import dataclasses
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional
from torchvision import models

import vivace
from vivace.errors import Refused
from vivace.inspection import inspect
from vivace.ledger import Observation
from vivace.plan import Plan
from vivace.session.opening import start
from vivace.technique import registry
from vivace.techniques.fold_eval.folding import install
from vivace.testing import TINY_JOBS, TechniqueContract
from vivace.training.evaluation import Evaluation
from vivace.verifying.states import repeatable

FoldEval = registry.find("fold_eval")
pytestmark = pytest.mark.usefixtures("one_thread")


class TestFoldEval(TechniqueContract):
    technique = FoldEval


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 6, 1, bias=False), nn.BatchNorm2d(6, affine=False)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)),
    )


def batch_of(seed):
    numbers = torch.Generator().manual_seed(seed)
    return torch.randn(8, 3, 6, 6, generator=numbers), torch.randint(4, (8,), generator=numbers)


def opened(model, plan=None):
    def loss(m, batch):
        return functional.cross_entropy(m(batch[0]), batch[1])

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plan = Plan.from_dict({"fold_eval": {}} if plan is None else plan)
    return vivace.attach(plan, model=model, optimizer=optimizer, loss=loss)


def mean_output(model, batches):
    return float(torch.cat([model(images) for images, _ in batches]).abs().mean())


@torch.no_grad()
def evaluated(model, images):
    model.eval()
    outputs = model(images)
    model.train()
    return outputs


def norms_run(model, images):
    """How often a BatchNorm runs in one evaluation."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
    ) as profiler:
        evaluated(model, images)
    return sum(event.name == "aten::batch_norm" for event in profiler.events())


def test_evaluation_follows_the_weights_and_runs_no_batchnorm():
    model = network()
    images, before = batch_of(9)[0], None
    with opened(model) as session:
        assert session.build.notes["folded_norms"] == {"1", "4"}
        for seed in range(4):
            session.step(batch_of(seed))
            seen, plain = evaluated(model, images), copy.deepcopy(model)
            for module in plain.modules():
                vars(module).pop("forward", None)
            wanted = evaluated(plain, images)
            torch.testing.assert_close(seen, wanted, rtol=1e-5, atol=1e-6)
            assert before is None or not torch.allclose(seen, before)
            before = seen
            model[0].weight.data.mul_(1.01)  # no version counter moves
            model[1].running_var.data.mul_(1.5)
        assert norms_run(model, images) == 0
        assert norms_run(plain, images) == 2
    assert norms_run(model, images) == 2
    assert not any("forward" in vars(m) for m in model.modules())


def test_the_metric_of_a_job_is_folded_and_the_same():
    job = dataclasses.replace(TINY_JOBS["cnn"](), metric=mean_output)

    def seen(plan):
        with start(job, Plan.from_dict(plan), inspect()) as session:
            for batch in session.batches(job.data()):
                session.step(batch)
            evaluation = Evaluation(job, session, seed=0)
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
            ) as profiler:
                value = evaluation.metric()
            return value, sum(event.name == "aten::batch_norm" for event in profiler.events())

    (mine, none), (theirs, some) = seen({"fold_eval": {}}), seen({})
    assert mine == pytest.approx(theirs, rel=1e-5)
    assert none == 0 < some


def test_training_is_bit_for_bit_what_it_was():
    def trained(plan):
        model, losses = network(), []
        keys = list(model.state_dict())
        with repeatable(True), opened(model, plan) as session:
            for seed in range(3):
                losses.append(session.step(batch_of(seed)).item())
                evaluated(model, batch_of(9)[0])
            assert list(model.state_dict()) == keys
        return losses, model.state_dict()

    mine, theirs = trained({"fold_eval": {}}), trained({})
    assert mine[0] == theirs[0]
    assert all(torch.equal(mine[1][key], value) for key, value in theirs[1].items())


def test_what_is_not_plain_evaluation_is_the_persons_own():
    model = network()
    images = batch_of(0)[0]
    with opened(model):
        model.eval()
        model(images).sum().backward()  # a gradient in evaluation mode
        assert model[1].weight.grad is not None
        with torch.no_grad():
            model[1].train()  # a norm that takes the batch's statistics
            tracked = model[1].running_mean.clone()
            model(images)
            assert not torch.equal(model[1].running_mean, tracked)
            model[1].eval()
            seen = []
            model[0].register_forward_hook(lambda *_: seen.append(1))
            model(images)
        assert seen == [1], "a hook on a folded convolution fires"


@pytest.mark.parametrize(
    ("name", "folded"), [("resnet18", 20), ("mobilenet_v3_small", 34), ("densenet", 5), ("googlenet", 57)]
)
def test_networks_evaluate_the_same(name, folded):
    """In float64: a difference is a fault, no rounding."""
    torch.manual_seed(0)
    if name == "densenet":  # of each layer's two norms one stands behind a convolution, and the stem's
        model = models.DenseNet(growth_rate=4, block_config=(2, 2), num_init_features=8, num_classes=4)
    else:
        more = {"aux_logits": False, "init_weights": False} if name == "googlenet" else {}
        model = getattr(models, name)(num_classes=4, **more)
    model.double()
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
            nn.init.uniform_(module.weight, 0.5, 2.0)
    wanted = evaluated(model, images)
    found = set()
    undo, _ = install(model, found)
    torch.testing.assert_close(evaluated(model, images), wanted, rtol=1e-9, atol=1e-9)
    assert len(found) == folded
    undo()
    assert not any("forward" in vars(m) for m in model.modules())


def test_half_precision_stays_half_precision():
    model = network().bfloat16()
    images = batch_of(0)[0].bfloat16()
    wanted = evaluated(model, images)
    undo, _ = install(model, set())
    seen = evaluated(model, images)
    undo()
    assert seen.dtype == torch.bfloat16
    torch.testing.assert_close(seen, wanted, rtol=0.05, atol=0.02)


def test_it_is_refused_by_name_and_proposed_to_nobody():
    with pytest.raises(Refused, match="no convolution of Sequential has a BatchNorm alone behind it"):
        opened(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.BatchNorm2d(4)))
    with pytest.raises(Refused, match="it changed nothing"):
        FoldEval().confirm(Observation({}, {}, 0, 0.0, notes={"folded_norms": set()}), None)
    assert FoldEval.candidates(None, None) == []


@pytest.mark.parametrize("name", ["fold_eval", "padded_stem"])
def test_a_model_that_is_pickled_meanwhile_holds_nothing_of_vivace(name):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    images = torch.randn(2, 3, 6, 6)
    with vivace.attach(vivace.Plan.from_dict({name: {}}), step=lambda batch: None, models=[model]):
        model.eval()(images)
        pickled = pickle.dumps(model)
        twin = copy.deepcopy(model)
    assert b"vivace" not in pickled
    with torch.no_grad():
        wanted = model(images)
        model[0].weight.zero_()
        for other in (pickle.loads(pickled), twin):
            torch.testing.assert_close(other(images), wanted)
