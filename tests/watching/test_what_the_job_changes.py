"""What the job's own code changes, between two steps or in one, is no fault of the plan's."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, LRScheduler, StepLR
from torch.utils.data import DataLoader, TensorDataset

import vivace

pytestmark = pytest.mark.usefixtures("one_thread")
BFLOAT16 = vivace.Plan.from_dict({"bf16_autocast": {}})


class Annealed(nn.Module):
    """Its outputs have a temperature, and its first layer does not train at first."""

    newest = None

    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 4)
        self.temperature = 1.0
        self.first.requires_grad_(False)
        Annealed.newest = self

    def forward(self, inputs):
        return self.last(self.drop(self.first(inputs).relu())) / self.temperature


class Schedule:
    """One of a person's own, for which `change` does something."""

    def __init__(self, change):
        self.change, self.epoch = change, 0

    def step(self):
        self.epoch += 1
        self.change(Annealed.newest, self.epoch)

    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]


def cool(model, epoch):
    model.temperature = 0.5**epoch


def drop_less(model, epoch):
    model.drop.p = 0.5 * 0.5**epoch


def thaw(model, epoch):
    model.first.requires_grad_(True)


def everything(model):
    return torch.optim.SGD(model.parameters(), lr=0.05)


@pytest.mark.parametrize("change", [cool, drop_less, thaw])
def test_what_a_schedule_of_the_persons_changes_in_the_model(watched, dropping, change):
    job = dropping(model=Annealed, optimizer=everything, scheduler=lambda _: Schedule(change), epochs=3)
    run = watched(job, BFLOAT16)
    assert run.watched["kept"] is True, run.watched["sentence"]
    assert run.watched["steps"] >= 8


class Growing(torch.optim.SGD):
    """Its learning rate is its own, from the fourth step on."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            if group["count"] % 4 == 0:
                group["lr"] *= 0.9
        return super().step(closure)


class Decay(LRScheduler):
    def get_lr(self):
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.01 * (1 + self.last_epoch)
        return [group["lr"] for group in self.optimizer.param_groups]


def by_a_function(optimizer):
    def factor(epoch):
        optimizer.param_groups[0]["weight_decay"] = 0.01 * (1 + epoch)
        return 1.0

    return LambdaLR(optimizer, factor)


@pytest.mark.parametrize(
    "fields",
    [
        {"optimizer": lambda model: Growing(model.parameters(), lr=0.05)},
        {"scheduler": lambda optimizer: ChainedScheduler([Decay(optimizer), StepLR(optimizer, 1, 0.9)])},
        {"scheduler": by_a_function},
    ],
    ids=["optimizer", "chained", "function"],
)
def test_settings_that_the_jobs_own_code_changes(watched, dropping, fields):
    run = watched(dropping(**fields, epochs=3), BFLOAT16)
    assert run.watched["kept"] is True, run.watched["sentence"]
    assert run.watched["steps"] >= 8


def test_a_learning_rate_that_is_set_by_a_name_of_the_file(watched, dropping, digest, tmp_path):
    def make():
        made, count = [], [0]

        def optimizer(model):
            made.append(torch.optim.SGD(model.parameters(), lr=0.05))
            return made[-1]

        def warm_up(model):
            count[0] += 1
            made[-1].param_groups[0]["lr"] = 0.05 * min(1.0, count[0] / 20)

        return dropping(optimizer=optimizer, on_gradients=warm_up, epochs=2)

    run = watched(make(), BFLOAT16)
    assert run.watched["sentence"].startswith("not watched: a step sets what its optimizer does by a name")
    watched(make(), BFLOAT16, out="plain", watch=0)
    assert digest(tmp_path / "run" / "model.pt") == digest(tmp_path / "plain" / "model.pt")


class Pair:
    def __init__(self, rows):
        self.inputs, self.labels = (torch.stack(column) for column in zip(*rows, strict=True))


def test_a_batch_of_an_own_class_that_the_loss_edits(watched, dropping):
    numbers = torch.Generator().manual_seed(0)
    data = TensorDataset(
        50 * torch.randn(56, 8, generator=numbers), torch.randint(4, (56,), generator=numbers)
    )

    def loss(model, batch):
        batch.inputs = batch.inputs / 50
        return functional.cross_entropy(model(batch.inputs), batch.labels)

    def loader():
        return DataLoader(data, 16, collate_fn=Pair)

    run = watched(
        dropping(model=lambda: nn.Linear(8, 4), data=loader, loss=loss, metric=None, epochs=2), BFLOAT16
    )
    assert run.watched["kept"] is True, run.watched["sentence"]


def test_a_batch_that_the_loss_edits_later(watched, dropping):
    count = [0]

    def loss(model, batch):
        count[0] += 1
        if count[0] > 4:
            batch[0].mul_(0.9)
        return functional.cross_entropy(model(batch[0]), batch[1])

    run = watched(dropping(loss=loss, metric=None, epochs=2), BFLOAT16)
    assert run.watched["kept"] is True, run.watched["sentence"]
    assert run.watched["steps"] >= 6


class Best(nn.Module):
    """Keeps its best metric, and statistics that the metric computes anew."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 4), nn.BatchNorm1d(4)
        self.register_buffer("best", torch.tensor(-1e9))

    def forward(self, inputs):
        return self.norm(self.linear(inputs))


def test_a_metric_that_computes_something_anew(watched, dropping):
    asked = []

    def metric(model, batches):
        asked.append(1)
        found = list(batches)
        torch.optim.swa_utils.update_bn([inputs for inputs, _ in found], model)
        value = -sum(float(functional.cross_entropy(model(x), y)) for x, y in found)
        model.best.fill_(max(float(model.best), value))
        return value

    data = dropping().data().dataset
    ordered = {"data": lambda: DataLoader(data, 16), "validation": lambda: DataLoader(data, 16)}
    run = watched(dropping(model=Best, metric=metric, epochs=3, **ordered), BFLOAT16)
    assert run.watched["kept"] is True, run.watched["sentence"]
    assert run.watched["between_steps"] >= 3
    assert len(asked) == 3


class Interpolating(torch.optim.SGD):
    """Trains weights that are not those to evaluate, as optimizers without a schedule do."""

    def turn(self, part):
        for group in self.param_groups:
            for weight in group["params"]:
                if "far" in self.state[weight]:
                    weight.data.lerp_(self.state[weight]["far"], part)

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight].setdefault("far", weight.detach().clone())


def test_an_optimizer_that_is_turned_for_the_evaluation(watched, dropping):
    made = []

    def optimizer(model):
        made.append(Interpolating(model.parameters(), lr=0.05, momentum=0.9))
        return made[-1]

    def metric(model, batches):
        made[-1].turn(1 - 1 / 0.9)
        value = -sum(float(functional.cross_entropy(model(x), y)) for x, y in batches)
        made[-1].turn(1 - 0.9)
        return value

    run = watched(dropping(optimizer=optimizer, metric=metric, epochs=3), BFLOAT16)
    assert run.watched["kept"] is True, run.watched["sentence"]
