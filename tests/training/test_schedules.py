"""Schedules and optimizers of a person's own: what a checkpoint cannot keep, or what goes the wrong way."""

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from vivace.errors import JobError
from vivace.training.training import train

Plateau = torch.optim.lr_scheduler.ReduceLROnPlateau


class Warmup:
    """The schedule of many a transformer, in six lines."""

    def __init__(self, optimizer):
        self.optimizer, self.steps = optimizer, 0

    def step(self):
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 / self.steps


class Kept(Warmup):
    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


class Pair:
    """Optimizers of an own step in an object of the person's own."""

    def __init__(self, model):
        self.one = torch.optim.Adam(model.parameters(), lr=0.01)


@pytest.mark.parametrize("together", [False, True])
def test_a_schedule_that_would_begin_again_is_the_jobs_fault(tmp_path, tiny, together):
    def scheduler(optimizer):
        return (
            [torch.optim.lr_scheduler.StepLR(optimizer, 1), Warmup(optimizer)]
            if together
            else Warmup(optimizer)
        )

    with pytest.raises(
        JobError, match=r"returned a Warmup, which has no state_dict: .* begin its schedule again"
    ):
        train(tiny.make(scheduler=scheduler), out=tmp_path / "run")


def test_a_schedule_that_tells_its_state_goes_on(tmp_path, tiny, digest):
    job = tiny.make(scheduler=Kept, scheduler_every="step")
    train(job, out=tmp_path / "whole")
    train(job, out=tmp_path / "run", max_steps=4)
    train(job, out=tmp_path / "run", resume=True)
    assert digest(tmp_path / "run" / "model.pt") == digest(tmp_path / "whole" / "model.pt")


def test_optimizers_that_would_begin_again_are_the_jobs_fault(tmp_path, tiny):
    def step(model, pair, batch):
        value = tiny.loss(model, batch)
        pair.one.zero_grad()
        value.backward()
        pair.one.step()
        return value.detach()

    def job(optimizer):
        return tiny.make(loss=None, step=step, scheduler=None, optimizer=optimizer)

    for optimizer in (Pair, lambda model: {"both": Pair(model)}):
        with pytest.raises(JobError, match="returned a Pair, which has no state_dict"):
            train(job(optimizer), out=tmp_path / "run")


@pytest.mark.parametrize(
    ("mode", "more", "told"),
    [("min", {}, "waits for a metric that falls"), ("max", {"metric": None}, "waits for a loss that rises")],
)
def test_a_plateau_in_the_wrong_direction_is_the_jobs_fault(tmp_path, tiny, mode, more, told):
    """Its rate would fall as often as the model becomes better."""
    job = tiny.make(scheduler=lambda optimizer: Plateau(optimizer, mode=mode), **more)
    with pytest.raises(JobError, match=told):
        train(job, out=tmp_path / "run")


def test_without_a_metric_a_plateau_is_the_losses(tmp_path, tiny):
    job = tiny.make(scheduler=Plateau, metric=None)
    assert train(job, out=tmp_path / "run").epochs == 3


def test_a_plateau_of_the_loss_goes_on_from_the_end_of_an_epoch(tmp_path, tiny, digest):
    """The newest checkpoint is of the epoch's last step, before the schedule has seen its loss."""

    def stop(event):
        if event.kind == "epoch":
            raise KeyboardInterrupt

    job = tiny.make(scheduler=lambda optimizer: Plateau(optimizer, patience=0, threshold=0.5), metric=None)
    train(job, out=tmp_path / "whole", checkpoint_every_steps=5)
    with pytest.raises(KeyboardInterrupt):
        train(job, out=tmp_path / "run", checkpoint_every_steps=5, on_event=stop)
    train(job, out=tmp_path / "run", resume=True)
    assert digest(tmp_path / "run" / "model.pt") == digest(tmp_path / "whole" / "model.pt")
    whole, parts = (
        torch.load(tmp_path / name / "checkpoints" / "step_15" / "state.pt", weights_only=True)["scheduler"]
        for name in ("whole", "run")
    )
    assert parts == whole


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1, "persistent_workers": True}])
def test_the_epoch_that_a_dataset_is_told_counts_after_a_stop(tmp_path, tiny, digest, workers):
    class Curriculum(type(tiny.make().data().dataset)):
        epoch = -1

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __getitem__(self, index):
            inputs, label = super().__getitem__(index)
            return inputs * (1 + self.epoch), label

    job = tiny.make(data=lambda: DataLoader(Curriculum(), batch_size=8, shuffle=True, **workers))
    train(job, out=tmp_path / "whole")
    train(job, out=tmp_path / "run", max_steps=7)
    train(job, out=tmp_path / "run", resume=True)
    assert digest(tmp_path / "run" / "model.pt") == digest(tmp_path / "whole" / "model.pt")


def test_a_schedule_that_computes_with_numpy_is_kept(tmp_path, tiny, digest):
    """Its rates are NumPy's numbers, which no file that runs no code can hold."""

    def scheduler(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 + numpy.cos(step))

    job = tiny.make(scheduler=scheduler, scheduler_every="step")
    train(job, out=tmp_path / "whole")
    train(job, out=tmp_path / "run", max_steps=7)
    assert train(job, out=tmp_path / "run", resume=True).notices == ()
    assert digest(tmp_path / "run" / "model.pt") == digest(tmp_path / "whole" / "model.pt")
    rates = torch.load(tmp_path / "run" / "checkpoints" / "step_15" / "state.pt", weights_only=True)
    assert [type(rate) for rate in rates["scheduler"]["_last_lr"]] == [float]


class Tabled(Kept):
    def state_dict(self):
        return {"table": numpy.linspace(0.1, 0.0, 9), "steps": self.steps}


def test_a_state_that_no_checkpoint_can_hold_is_refused_before_the_first_step(tmp_path, tiny):
    def loss(model, batch):
        raise AssertionError("a step was taken")

    with pytest.raises(JobError, match=r"scheduler has a state that no checkpoint can hold \('table' is"):
        train(tiny.make(scheduler=Tabled, loss=loss), out=tmp_path / "run")


class Precise(torch.optim.Optimizer):
    """Weights in bfloat16, and a momentum of theirs in fp32 with a count of its updates."""

    def __init__(self, weights):
        super().__init__(weights, {"lr": 0.05})

    @torch.no_grad()
    def step(self):
        for weight in self.param_groups[0]["params"]:
            state = self.state[weight]
            if not state:
                state["momentum"], state["count"] = torch.zeros_like(weight).float(), torch.tensor(0)
            state["count"] += 1
            state["momentum"].mul_(0.9).add_(weight.grad.float())
            weight.sub_((0.05 * state["momentum"]).bfloat16())


def test_an_optimizers_numbers_keep_their_type_after_a_stop(tmp_path, tiny, digest):
    """torch casts what it loads to the type of the weights."""
    job = tiny.make(
        model=lambda: torch.nn.Linear(6, 3).bfloat16(),
        loss=lambda model, batch: tiny.loss(model, (batch[0].bfloat16(), batch[1])),
        optimizer=lambda model: Precise(model.parameters()),
        scheduler=None,
        metric=None,
    )
    train(job, out=tmp_path / "whole")
    train(job, out=tmp_path / "run", max_steps=7)
    train(job, out=tmp_path / "run", resume=True)
    whole, parts = (
        torch.load(tmp_path / name / "checkpoints" / "step_15" / "state.pt", weights_only=True)["optimizer"]
        for name in ("whole", "run")
    )
    for index, state in whole["state"].items():
        for name, value in state.items():
            assert parts["state"][index][name].dtype == value.dtype
            assert torch.equal(parts["state"][index][name], value)
