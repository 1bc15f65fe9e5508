"""Learning rates across widths: what a few steps change must not grow with the width."""

import dataclasses
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import vivace
from vivace.errors import JobError
from vivace.job import JobFunction
from vivace.sweeping.transfer import Transferred, coordinate_check, growths_of, transferred

pytestmark = pytest.mark.usefixtures("one_thread")


class Block(nn.Module):
    """A small transformer over 6 tokens of 8, heads of 8 numbers: wider means more heads."""

    def __init__(self, width):
        super().__init__()
        self.tokens = nn.Embedding(8, width)
        self.places = nn.Parameter(torch.zeros(1, 6, width))
        layer = nn.TransformerEncoderLayer(
            width, width // 8, 2 * width, 0.0, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 4)

    def append(self, module):
        self.last = module
        return self

    def forward(self, x):
        return self.head(self.norm(self.body(self.tokens(x) + self.places)).mean(1))


MODELS = {
    "mlp": lambda w: nn.Sequential(nn.Linear(10, w), nn.ReLU(), nn.Linear(w, w), nn.ReLU(), nn.Linear(w, 4)),
    "cnn": lambda w: nn.Sequential(
        nn.Conv2d(1, w, 3),
        nn.ReLU(),
        nn.Conv2d(w, w, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(w, 4),
    ),
    "transformer": Block,
}
INPUTS = {"mlp": (10,), "cnn": (1, 6, 6), "transformer": (6,)}


def job(lr: float = 0.01, width: int = 32, model: str = "mlp", optimizer: str = "adam") -> vivace.Job:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, *INPUTS[model], generator=generator)
    if model == "transformer":
        x = (x.abs() * 4).long() % 8
    data = TensorDataset(x, torch.randint(4, (64,), generator=generator))
    optimizers = {
        "adam": lambda m: torch.optim.Adam(m.parameters(), lr=lr),
        "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=lr, weight_decay=0.1),
        "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=lr),
        "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=lr),
    }
    return vivace.Job(
        model=lambda: MODELS[model](width),
        data=lambda: DataLoader(data, batch_size=32),
        loss=lambda m, batch: functional.cross_entropy(m(batch[0]), batch[1]),
        optimizer=optimizers[optimizer],
    )


WIDTHS = {"mlp": (32, 128, 512), "cnn": (8, 32, 96), "transformer": (16, 64, 192)}
RATES = {("mlp", "adam"): 0.01, ("mlp", "sgd"): 0.3, ("cnn", "adam"): 0.01, ("transformer", "adam"): 0.005}


@pytest.mark.parametrize(("model", "optimizer"), list(RATES))
def test_the_coordinate_check_holds_with_transfer_and_fails_without(model, optimizer):
    fixed, widths = {"model": model, "optimizer": optimizer, "lr": RATES[model, optimizer]}, WIDTHS[model]
    with_it = coordinate_check(Transferred(job, "width", widths[0]), "width", widths, fixed)
    without = coordinate_check(JobFunction(job), "width", widths, fixed)
    assert set(with_it) == set(without)
    assert max(with_it.values()) < 0.25, with_it
    assert min(with_it.values()) > -0.6, with_it
    if optimizer == "adam":
        assert max(without.values()) > 0.4, without
    else:  # with SGD the first layers stop learning as they grow, which transfer mends
        assert min(without.values()) < min(with_it.values()) - 0.2, (without, with_it)


def rates(optimizer, model):
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)]: group["lr"] for group in optimizer.param_groups for p in group["params"]}


def test_the_rules_are_those_of_the_table():
    wide = transferred(job(lr=1.0, width=64), job(lr=1.0, width=16))
    model = wide.model()
    adam = rates(wide.optimizer(model), model)
    assert (adam["0.weight"], adam["2.weight"], adam["4.weight"]) == (1.0, 0.25, 0.25)
    assert (adam["0.bias"], adam["4.bias"]) == (1.0, 1.0)
    wide = transferred(job(lr=1.0, width=64, optimizer="sgd"), job(lr=1.0, width=16))
    model = wide.model()
    sgd = rates(wide.optimizer(model), model)
    assert (sgd["0.weight"], sgd["2.weight"], sgd["4.weight"]) == (4.0, 1.0, 0.25)
    assert (sgd["0.bias"], sgd["4.bias"]) == (4.0, 1.0)


def test_what_is_added_counts_as_a_bias_and_transposed_weights_give_out_their_second_side():
    model, base = (Block(width).append(nn.ConvTranspose2d(width, 3, 2)) for width in (64, 16))
    found = growths_of(model, base)
    assert (found["places"].rate(adaptive=True), found["places"].rate(adaptive=False)) == (1.0, 4.0)
    assert found["last.weight"].is_output


def test_adamws_decay_of_a_weight_stays():
    wide = transferred(job(width=64, optimizer="adamw"), job(width=16))
    for group in wide.optimizer(wide.model()).param_groups:
        assert group["lr"] * group["weight_decay"] == pytest.approx(0.001)


def test_so_does_that_of_an_adam_whose_decay_is_adamws():
    def optimizer(model):
        return torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1, decoupled_weight_decay=True)

    wide = transferred(dataclasses.replace(job(width=64), optimizer=optimizer), job(width=16))
    for group in wide.optimizer(wide.model()).param_groups:
        assert group["lr"] * group["weight_decay"] == pytest.approx(0.001)


def test_the_base_is_left_as_it_is():
    torch.manual_seed(0)
    plain = job(width=16).model()
    torch.manual_seed(0)
    same = Transferred(job, "width", 16)(width=16).model()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), same.parameters(), strict=True))


def test_building_the_base_draws_from_no_stream_of_the_training():
    torch.manual_seed(0)
    plain = job(width=64).model()
    torch.manual_seed(0)
    wide = transferred(job(width=64), job(width=16)).model()
    assert torch.equal(plain[2].weight, wide[2].weight)
    torch.testing.assert_close(plain[4].weight / 2, wide[4].weight)
    assert growths_of(wide, job(width=16).model())["4.weight"].is_output


def one_cycle(optimizer, *, own):
    return torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [group["lr"] for group in optimizer.param_groups] if own else 0.01, total_steps=8
    )


def test_a_schedule_that_sets_learning_rates_itself_is_refused():
    """OneCycleLR with one rate for all would undo what was carried over."""
    schedules = [partial(one_cycle, own=own) for own in (False, True)]
    schedules.append(lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: epoch / 4))
    jobs = [
        transferred(dataclasses.replace(job(width=64), scheduler=one), job(width=16)) for one in schedules
    ]
    with pytest.raises(JobError, match="OneCycleLR sets learning rates itself"):
        jobs[0].scheduler(jobs[0].optimizer(jobs[0].model()))
    for multiplying in jobs[1:]:
        assert multiplying.scheduler(multiplying.optimizer(multiplying.model())) is not None


@pytest.mark.parametrize(
    ("schedule", "what"),
    [
        (
            lambda o: lr_scheduler.CosineAnnealingLR(o, 100, eta_min=1e-4),
            "CosineAnnealingLR with eta_min=0.0001",
        ),
        (lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 9, eta_min=1e-4), "eta_min=0.0001"),
        (lambda o: lr_scheduler.ReduceLROnPlateau(o, min_lr=1e-4), "ReduceLROnPlateau with min_lr=0.0001"),
        (
            lambda o: lr_scheduler.CyclicLR(o, [g["lr"] for g in o.param_groups], 1.0, cycle_momentum=False),
            "max_lr=1",
        ),
        (
            lambda o: lr_scheduler.SequentialLR(
                o, [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingLR(o, 9, eta_min=1e-5)], [5]
            ),
            "CosineAnnealingLR with eta_min=1e-05",
        ),
    ],
)
def test_a_schedule_that_comes_to_a_rate_of_its_own_is_refused(schedule, what):
    """Although it begins with those of the groups: the hidden weights' may be below it, and would rise."""
    wide = transferred(dataclasses.replace(job(width=64), scheduler=schedule), job(width=16))
    with pytest.raises(JobError, match=f"the Job's .*{what} sets learning rates itself"):
        wide.scheduler(wide.optimizer(wide.model()))


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: lr_scheduler.CosineAnnealingLR(o, 100),
        lambda o: lr_scheduler.ReduceLROnPlateau(o, min_lr=[g["lr"] / 10 for g in o.param_groups]),
        lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.LinearLR(o), lr_scheduler.StepLR(o, 3)], [5]),
    ],
)
def test_a_schedule_that_comes_to_nothing_or_to_a_share_is_none_of_these(schedule):
    wide = transferred(dataclasses.replace(job(width=64), scheduler=schedule), job(width=16))
    assert wide.scheduler(wide.optimizer(wide.model())) is not None


class Tied(nn.Module):
    """Words in and out by one table, or by a table each; or one layer under two names."""

    def __init__(self, width, kinds):
        super().__init__()
        self.words = nn.Embedding(8, width) if "embedding" in kinds else nn.Linear(width, 8, bias=False)
        self.head = nn.Linear(width, 8, bias=False)
        if "tied" in kinds:
            self.head.weight = self.words.weight


def test_a_weight_that_is_both_looked_up_and_multiplied_is_refused():
    with pytest.raises(
        JobError, match=r"'words.weight' and 'head.weight' are one weight, whose learning rate"
    ):
        growths_of(Tied(64, "embedding, tied"), Tied(16, "embedding, tied"))
    assert not growths_of(Tied(64, "embedding"), Tied(16, "embedding"))["words.weight"].is_output
    assert growths_of(Tied(64, "tied"), Tied(16, "tied"))["words.weight"].is_output
    assert (
        growths_of(Tied(16, "embedding, tied"), Tied(16, "embedding, tied"))["words.weight"].rate(True) == 1.0
    )


def test_a_weight_that_is_not_the_models_is_refused():
    def optimizer(model):
        return torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(3))], lr=0.1)

    wide = transferred(dataclasses.replace(job(width=64), optimizer=optimizer), job(width=16))
    with pytest.raises(JobError, match="the optimizer has others, too"):
        wide.optimizer(wide.model())


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [({"optimizer": "rmsprop"}, "not for RMSprop"), ({"model": "cnn"}, "must have the same weights")],
)
def test_what_has_no_rule_is_refused(changed, sentence):
    wide = transferred(job(width=64, **changed), job(width=16))
    plain = job(width=64, **changed).model()
    with pytest.raises(JobError, match=sentence):
        wide.optimizer(plain)
