"""A plan that is found on a run's own steps: all of them train, and the run goes over to it."""

import dataclasses
import json
import os
import signal
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import vivace
from vivace import Card, Numerics, Seam, Stage, Technique
from vivace.errors import InputError
from vivace.live import course, loop, spending
from vivace.training.checkpoints import kept_plan

pytestmark = pytest.mark.usefixtures("one_thread")


class Slow(nn.Module):
    """Takes long, by the tests' clock, unless something tells it not to."""

    in_a_hurry = False
    spent: ClassVar = SimpleNamespace(now=0.0)

    def forward(self, inputs):
        if self.training:
            Slow.spent.now += 0.001 if Slow.in_a_hurry else 0.01
        return inputs


@dataclasses.dataclass(frozen=True)
class Hurry(Technique):
    """Makes `Slow` quick, and changes no number; with `wrong` also what the model returns."""

    card: ClassVar[Card] = Card(Stage.MODEL, Numerics.ROUNDING, "no waiting", "", unit_roundoff=2.0**-24)
    name: ClassVar[str] = "hurry"

    wrong: float = 0.0
    only_models: bool = False

    def apply(self, build):
        build.require(build.own_step or not self.only_models, "it wants the model alone")

        def quick(following, batch):
            Slow.in_a_hurry = True
            try:
                return following(batch) * (1 + self.wrong)
            finally:
                Slow.in_a_hurry = False

        build.wrap(Seam.STEP, quick)


@dataclasses.dataclass(frozen=True)
class Idle(Technique):
    """Does nothing at all."""

    card: ClassVar[Card] = Card(Stage.MODEL, Numerics.ROUNDING, "nothing", "", unit_roundoff=2.0**-24)
    name: ClassVar[str] = "idle"

    def apply(self, build):
        build.wrap(Seam.STEP, lambda following, batch: following(batch))


def job(**changes):
    """A perceptron with dropout, an evaluation an epoch, and a last batch that is smaller."""
    numbers = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(180, 8, generator=numbers), torch.randint(4, (180,), generator=numbers))
    fields = {
        "model": lambda: nn.Sequential(
            Slow(), nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 4)
        ),
        "data": lambda: DataLoader(data, batch_size=16, shuffle=True),
        "loss": lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        "metric": lambda model, batches: (
            -sum(float(functional.cross_entropy(model(x), y)) for x, y in batches)
        ),
        "epochs": 12,
    }
    return vivace.Job(**{**fields, **changes})


@pytest.fixture
def tuned(tmp_path, monkeypatch, register, turned):
    """``(*techniques, ...) -> Run``: train and try these techniques alone, in steps that are worth it."""
    register(Hurry)
    register(Idle)
    monkeypatch.setattr(spending, "PATIENCE", 1e-9)
    monkeypatch.setattr(spending, "PAYS", 0.0)
    monkeypatch.setattr(course, "SEGMENT_SECONDS", 0.02)
    monkeypatch.setattr(loop, "Clock", lambda: turned.current.clock)
    monkeypatch.setattr(Slow, "spent", turned.current)

    def train(*techniques, out="run", **more):
        monkeypatch.setattr(course, "additions", lambda *_: [[technique] for technique in techniques])
        arguments = {"tune": True} | more
        return vivace.train(arguments.pop("job", job()), out=tmp_path / out, **arguments)

    return train


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The weights of the same training as it is."""
    torch.set_num_threads(1)  # as in the tests themselves
    folder = tmp_path_factory.mktemp("plain") / "run"
    vivace.train(job(), out=folder)
    return folder / "model.pt"


def same(mine, theirs):
    mine, theirs = (torch.load(path, weights_only=True) for path in (mine, theirs))
    return all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_the_run_goes_over_to_what_is_faster_and_every_step_trains(tuned, plain, tmp_path):
    before = nn.Module.__call__, nn.Sequential.__call__, torch.autograd.backward
    run = tuned(Hurry())
    assert (nn.Module.__call__, nn.Sequential.__call__, torch.autograd.backward) == before
    assert run.found["outcome"] == "faster"
    assert run.plan == run.found["plan"] == {"hurry": {}}
    assert run.found["ratio"]["low"] > 1.0
    assert {"saved_seconds", "own_seconds", "page"} <= run.found.keys()
    assert 8 < run.found["step"] <= run.steps == 12 * 12
    assert vivace.Plan.load(tmp_path / "run/plan.toml") == vivace.Plan([Hurry()])
    assert kept_plan(tmp_path / "run/checkpoints") == vivace.Plan([Hurry()])
    assert run.watched["kept"] is True
    assert run.watched["steps"] >= 1
    assert same(tmp_path / "run/model.pt", plain)
    assert "Same model: yes" in (tmp_path / "run/tune/run.html").read_text()
    records = (tmp_path / "run/tune/ledger.jsonl").read_text().splitlines()
    assert {"tried", "adopted"} <= {json.loads(line)["record"] for line in records}


def test_where_nothing_helps_the_run_is_as_it_was(tuned, plain, tmp_path):
    run = tuned(Idle(), Hurry(wrong=0.05))
    assert run.found["outcome"] == "not_faster"
    assert run.plan == {}
    assert run.watched is None
    assert any("this run goes on as it is" in text for text in run.notices)
    assert same(tmp_path / "run/model.pt", plain)


def test_a_stopped_search_is_resumed_under_what_it_had_found(tuned, plain, tmp_path):
    checkpoints, interrupted = tmp_path / "run/checkpoints", []

    def interrupt(event):
        saved = event.kind == vivace.EventKind.CHECKPOINT
        if saved and not interrupted and kept_plan(checkpoints).techniques:
            interrupted.append(event.step)
            os.kill(os.getpid(), signal.SIGINT)

    first = tuned(Hurry(), Idle(), checkpoint_every_steps=6, on_event=interrupt)
    assert first.interrupted_by == "SIGINT"
    assert not first.found["ended"]
    assert first.plan == {"hurry": {}}
    assert kept_plan(checkpoints) == vivace.Plan.load(tmp_path / "run/plan.toml") == vivace.Plan([Hurry()])

    vivace.Plan().save(tmp_path / "run/plan.toml")  # as if killed between the checkpoint and the file
    again = tuned(Idle(), resume=True)
    assert again.resumed_from_step == first.steps
    assert again.plan == {"hurry": {}}
    assert again.found == first.found  # it has its plan, and seeks no other
    assert same(tmp_path / "run/model.pt", plain)


def test_what_acts_on_the_models_call_alone_is_not_gone_over_to(tuned, plain, tmp_path):
    run = tuned(Hurry(only_models=True))
    assert run.plan == {}
    assert any("it wants the model alone" in text for text in run.notices)
    assert same(tmp_path / "run/model.pt", plain)


def test_a_run_too_short_for_a_search_is_left_alone(tuned, monkeypatch):
    monkeypatch.setattr(spending, "PATIENCE", 1e6)
    run = tuned(Hurry())
    assert run.plan == {}
    assert "too little for a search to pay" in run.found["reason"]


def test_a_fault_of_the_engine_does_not_reach_the_run(tuned, plain, tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("planted")

    monkeypatch.setattr(course, "Proof", fail)
    run = tuned(Hurry())
    assert run.plan == {}
    assert "planted" in run.found["reason"]
    assert same(tmp_path / "run/model.pt", plain)


def test_torch_is_left_as_it_was_where_the_job_fails(tuned):
    before = nn.Module.__call__, nn.Sequential.__call__, torch.autograd.backward
    with pytest.raises(vivace.JobError):
        tuned(Hurry(), out="other", job=job(loss=lambda model, batch: 1 / 0))
    assert (nn.Module.__call__, nn.Sequential.__call__, torch.autograd.backward) == before


def test_what_cannot_be_led_is_refused_in_a_sentence(tuned, tmp_path):
    with pytest.raises(InputError, match="leave one of them out"):
        vivace.train(job(), vivace.Plan(), out=tmp_path / "run", tune=True)
    own = job(loss=None, optimizer=None, step=lambda model, optimizer, batch: torch.zeros(()))
    with pytest.raises(InputError, match="a step of its own"):
        tuned(Hurry(), job=own, out="own")


def test_several_ranks_are_sent_to_tune(command_on_ranks, tmp_path):
    for more in ((), ("--resume",)):
        codes, errors = command_on_ranks("train", "job.py:job", "--tune", "--out", "run", *more)
        assert codes == [2, 2]
        assert "works in one process, and 2 ranks were started: let vivace tune find a plan" in errors
    assert not (tmp_path / "run").exists()


def test_a_script_is_tuned_before_torchrun_starts_it(command_on_ranks):
    codes, errors = command_on_ranks("tune", "--", "python", "train.py")
    assert codes == [2, 0]  # where one speaks, and torchrun ends all
    assert "write vivace tune -- torchrun" in errors
