"""At the default share of the time: what is caught in thousands of tiny steps, and what that costs."""

import dataclasses
import functools
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

import vivace
from vivace import Seam
from vivace.errors import PromiseBroken
from vivace.watching import sentinel
from vivace.watching.schedule import Schedule
from vivace.watching.sentinel import Sentinel

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]
EPOCH, EPOCHS = 700, 8
SHARE = 0.01


def from_200(build, count):
    """A step is left out, and so is every one after it."""
    build.wrap(Seam.UPDATE, lambda following: following() if count.steps < 200 else None)


def every_200(build, count):
    build.wrap(Seam.UPDATE, lambda following: following() if count.steps % 200 else None)


def nothing(build, count):
    pass


@pytest.fixture(autouse=True)
def _own_time(monkeypatch):
    """Shares are of the processor's time that this process has used: others take none of it."""
    own = time.process_time
    monkeypatch.setattr(sentinel, "time", SimpleNamespace(perf_counter=own, monotonic=own))
    monkeypatch.setattr(sentinel, "Schedule", functools.partial(Schedule, clock=own))


@pytest.fixture
def job():
    numbers = torch.Generator().manual_seed(0)
    inputs = torch.randn(35, 256, 512, generator=numbers)
    labels = torch.randint(10, (35, 256), generator=numbers)
    batches = list(zip(inputs, labels, strict=True)) * (EPOCH // 35)
    return vivace.Job(
        model=lambda: nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)),
        data=lambda: batches,
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        epochs=EPOCHS,
    )


@pytest.mark.parametrize(("defect", "period"), [(from_200, 1), (every_200, 200)])
def test_a_defect_from_step_200_and_one_of_every_200_steps_are_caught(plant, job, tmp_path, defect, period):
    with pytest.raises(PromiseBroken, match="does not train the same model") as stopped:
        vivace.train(job, plant(defect), out=tmp_path)
    step = int(str(stopped.value).split()[1])
    assert step >= 200
    assert step % period == 0


class Still:
    """Looks at nothing: what is measured of it beside what it says is what the measuring itself takes."""

    seconds = 0.0

    def step(self, take):
        begin = time.process_time()
        self.seconds += time.process_time() - begin
        return take(None)

    def rests(self):
        pass


@pytest.fixture
def timed(monkeypatch):
    """``(kind, name, spent)``: add what a method takes, without the step that it is given, to `spent`."""

    def time_it(kind, name, spent):
        own = getattr(kind, name)

        def call(self, *arguments, **keywords):
            began, inside = time.process_time(), [0.0]
            if name == "step":
                *arguments, take = arguments

                def taken(batch):
                    begin = time.process_time()
                    try:
                        return take(batch)
                    finally:
                        inside[0] = time.process_time() - begin

                arguments.append(taken)
            result = own(self, *arguments, **keywords)
            spent[name] += time.process_time() - began - inside[0]
            return result

        spent[name] = 0.0
        monkeypatch.setattr(kind, name, call)

    return time_it


def test_what_watching_cost_is_what_the_run_says(plant, job, tmp_path, timed):
    """All that the sentinel takes beside the steps themselves, by another clock."""
    epochs, spent, measuring, still = 5, {}, {}, Still()
    for name in ("step", "rests", "holds"):
        timed(Sentinel, name, spent)
    for name in ("step", "rests"):
        timed(Still, name, measuring)
    for _ in range(EPOCH * epochs):
        still.step(lambda batch: None)
        still.rests()
    began = time.process_time()
    run = vivace.train(dataclasses.replace(job, epochs=epochs), plant(nothing), out=tmp_path)
    seconds = time.process_time() - began
    assert run.watched["kept"] is True, run.watched["sentence"]
    assert run.watched["steps"] >= 3, run.watched["sentence"]
    assert run.watched["between_steps"] >= epochs, run.watched
    assert run.watched["share"] <= 1.2 * SHARE
    taken = sum(spent.values()) - (sum(measuring.values()) - still.seconds)
    passing_by = 0.003 * seconds  # what steps that are not looked at cost, and nobody counts
    assert 0.75 * taken - passing_by <= run.watched["seconds"] <= 1.25 * taken, (
        spent,
        measuring,
        run.watched,
    )
    assert run.watched["share"] == pytest.approx(run.watched["seconds"] / seconds, rel=0.25)
