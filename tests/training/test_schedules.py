"""Schedules and optimizers of a person's own: what a checkpoint cannot keep, or what goes the wrong way."""

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


def test_the_epoch_that_a_dataset_is_told_counts_after_a_stop(tmp_path, tiny, digest):
    class Curriculum(type(tiny.make().data().dataset)):
        epoch = -1

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __getitem__(self, index):
            inputs, label = super().__getitem__(index)
            return inputs * (1 + self.epoch), label

    job = tiny.make(data=lambda: DataLoader(Curriculum(), batch_size=8, shuffle=True))
    train(job, out=tmp_path / "whole")
    train(job, out=tmp_path / "run", max_steps=7)
    train(job, out=tmp_path / "run", resume=True)
    assert digest(tmp_path / "run" / "model.pt") == digest(tmp_path / "whole" / "model.pt")
