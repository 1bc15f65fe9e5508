"""What has changed in a job between two parts of a run: told, refused, or taken over."""

import dataclasses
import json

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import vivace
from vivace.errors import CheckpointError, FolderError, InputError, JobError
from vivace.training import training
from vivace.training.course import Fresh, course_of, differences
from vivace.training.resuming import load_into, state_of

JOB = """
import torch, vivace
from helper import rate

def loss(model, batch):
    return model(batch).square().mean(){more}

job = vivace.Job(
    model=lambda: torch.nn.Linear(3, 1),
    data=lambda: [torch.ones(4, 3)] * 6,
    loss=loss,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=rate, momentum={momentum}),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, {step}, 0.5),
    epochs=4,
)
"""


@pytest.fixture
def train(tmp_path, monkeypatch):
    """``(**changes) -> Run``: six steps of a job of which the file is written anew, then the rest."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("sys.dont_write_bytecode", True)

    def start(resume=True, more="", momentum=0.9, step=2, rate=0.1, comment="", **options):
        import sys

        (tmp_path / "helper.py").write_text(f"rate = {rate}{comment}\n")
        (tmp_path / "job.py").write_text(JOB.format(more=more, momentum=momentum, step=step))
        for name in [name for name in sys.modules if name == "helper" or name.startswith("vivace_job_")]:
            del sys.modules[name]
        job = f"{tmp_path / 'job.py'}:job"
        return vivace.train(job, out=tmp_path / "run", resume=resume, **options)

    start(resume=False, max_steps=6)
    return start


@pytest.mark.fault(34)
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"more": " + 1"}, r"has changed \(source of job\.py\)"),
        ({"rate": 0.2}, r"source of helper\.py; optimizer lr: 0\.1 -> 0\.2"),
        ({"momentum": 0.5}, r"optimizer momentum: 0\.9 -> 0\.5"),
        ({"step": 3}, r"scheduler step_size: 2 -> 3"),
    ],
)
def test_a_change_is_refused_with_what_it_is_and_told_where_it_is_accepted(train, changes, told):
    with pytest.raises(JobError, match=rf"{told}.*--changed ok"):
        train(**changes)
    run = train(**changes, changed="ok", max_steps=7)
    assert run.steps == 7
    assert run.notices[0].startswith("resumed, not bit-exact: source of ")


def test_comments_and_layout_are_no_change(train):
    assert train(comment="   # a tenth").notices == ()


def test_an_accepted_learning_rate_counts_from_there_on(train, tmp_path):
    train(rate=0.3, changed="ok", max_steps=13)
    state = torch.load(tmp_path / "run" / "checkpoints" / "step_13" / "state.pt", weights_only=True)
    assert state["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.15)  # after two epochs of four
    assert state["scheduler"]["base_lrs"] == [pytest.approx(0.3)]


def test_a_module_that_only_one_of_both_has_loaded_is_no_change():
    then, now = {"source of a.py": "1", "epochs": "3"}, {"source of b.py": "2", "epochs": "4", "lr": "0.1"}
    assert differences(then, now) == ["epochs: 3 -> 4", "lr: none -> 0.1"]


def test_what_becomes_of_damaged_samples_is_part_of_a_training():
    job = vivace.Job(model=list, data=list, loss=print, optimizer=print)
    then, now = (course_of(dataclasses.replace(job, damaged=way), None, None) for way in ("raise", "skip"))
    assert differences(then, now) == ["damaged: raise -> skip"]


def test_how_torch_computes_an_update_is_no_hyper_parameter():
    model = torch.nn.Linear(2, 2)
    job = vivace.Job(model=lambda: model, data=list, loss=print, optimizer=print)
    plain, fused = (torch.optim.SGD(model.parameters(), lr=0.1, fused=on) for on in (False, True))
    assert course_of(job, plain, None) == course_of(job, fused, None)
    assert course_of(job, plain, None) != course_of(job, torch.optim.SGD(model.parameters(), lr=0.2), None)


def test_a_learning_rate_of_one_optimizer_leaves_the_schedules_of_others():
    """Two groups under a warm-up and what follows it; the discriminator's schedule is its own."""

    def made(rate):
        nets = [torch.nn.Linear(2, 2) for _ in range(2)]
        groups = [{"params": [p], "lr": rate} for p in nets[0].parameters()]
        one, other = torch.optim.SGD(groups, lr=rate), torch.optim.SGD(nets[1].parameters(), lr=0.1)
        parts = [
            torch.optim.lr_scheduler.LinearLR(one),
            torch.optim.lr_scheduler.LambdaLR(one, lambda _: 1.0),
        ]
        whole = torch.optim.lr_scheduler.SequentialLR(one, parts, [5])
        return [one, other], [whole, torch.optim.lr_scheduler.LambdaLR(other, lambda _: 1.0)], parts

    job = vivace.Job(model=print, data=list, loss=print, optimizer=print)
    then, (optimizers, schedules, parts) = course_of(job, *made(0.1)[:2]), made(0.2)
    fresh, now = Fresh(optimizers, schedules), course_of(job, optimizers, schedules)
    saved_optimizers, saved_schedules, _ = made(0.1)
    for mine, saved in zip([*optimizers, *schedules], [*saved_optimizers, *saved_schedules], strict=True):
        mine.load_state_dict(saved.state_dict())
    fresh.take(then, now)
    assert [part.base_lrs for part in parts] == [[pytest.approx(0.2)] * 2] * 2
    assert schedules[1].base_lrs == [pytest.approx(0.1)]


def test_a_learning_rate_of_an_optimizer_inside_of_another_one_counts():
    class Outer(torch.optim.Optimizer):
        def __init__(self, weights, rate, shares):
            weights = list(weights)
            super().__init__(weights, {"lr": rate})
            self.inner = torch.optim.SGD(self.param_groups if shares else weights, lr=rate)

    job = vivace.Job(model=print, data=list, loss=print, optimizer=print)
    for shares in (True, False):
        before, one = (Outer(torch.nn.Linear(2, 2).parameters(), rate, shares) for rate in (0.1, 0.2))
        then, now, fresh = course_of(job, before, None), course_of(job, one, None), Fresh(one, None)
        assert ("inner optimizer lr" in now) is not shares
        assert not differences({key: now[key] for key in now if not key.startswith("inner")}, now)
        assert len(differences(then, now)) == (1 if shares else 2)
        load_into(one, state_of(before), "the optimizer")
        assert one.inner.param_groups[0]["lr"] == 0.1
        fresh.take(then, now)
        assert [each.param_groups[0]["lr"] for each in (one, one.inner)] == [pytest.approx(0.2)] * 2


def test_an_optimizer_that_finds_its_learning_rate_itself_may_be_given_one_and_back():
    class Finding(torch.optim.Optimizer):
        def __init__(self, weights, rate):
            super().__init__(weights, {"lr": rate})

    job = vivace.Job(model=print, data=list, loss=print, optimizer=print)
    for rates in ((None, 0.1), (0.1, None)):
        before, one = (Finding(torch.nn.Linear(2, 2).parameters(), rate) for rate in rates)
        then, now, fresh = course_of(job, before, None), course_of(job, one, None), Fresh(one, None)
        load_into(one, state_of(before), "the optimizer")
        fresh.take(then, now)
        assert one.param_groups[0]["lr"] == rates[1]


SCHEDULES = {
    "milestones": lambda rates, optimizer, length: rates.MultiStepLR(optimizer, [length, 90]),
    "phases": lambda rates, optimizer, length: rates.OneCycleLR(optimizer, 0.1, total_steps=length),
    "parts": lambda rates, optimizer, length: rates.SequentialLR(
        optimizer,
        [rates.LinearLR(optimizer, total_iters=3), rates.CosineAnnealingLR(optimizer, length)],
        [3],
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", SCHEDULES)
def test_an_accepted_schedule_counts_from_there_on(kind):
    """Also where what has changed in it is no plain number."""

    def made(length):
        optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
        return optimizer, SCHEDULES[kind](torch.optim.lr_scheduler, optimizer, length)

    def course(pair):
        return course_of(vivace.Job(model=print, data=list, loss=print, optimizer=print), *pair)

    def rates(optimizer, schedule):
        found = []
        for _ in range(10):
            schedule.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    before, wanted, resumed = made(15), made(25), made(25)
    then, now, fresh = course(before), course(resumed), Fresh(*resumed)
    rates(*before), rates(*wanted)
    for mine, saved in zip(resumed, before, strict=True):
        mine.load_state_dict(saved.state_dict())
    assert differences(then, now)
    fresh.take(then, now)
    if kind == "parts":
        assert resumed[1]._schedulers[1].T_max == 25
        assert resumed[1]._schedulers[1].last_epoch == before[1]._schedulers[1].last_epoch
    else:
        assert rates(*resumed) == pytest.approx(rates(*wanted))


def test_the_plan_of_the_newest_checkpoint_counts_also_where_it_is_none(tmp_path, monkeypatch):
    vivace.Plan.from_dict({"fused_optimizer": {}}).save(tmp_path / "plan.toml")
    monkeypatch.setattr(training, "kept_plan", lambda folder: vivace.Plan())
    assert training._own_plan(tmp_path) == vivace.Plan()
    monkeypatch.setattr(training, "kept_plan", lambda folder: None)
    assert training._own_plan(tmp_path).names == ("fused_optimizer",)


@pytest.mark.fault(32)
def test_checkpoints_that_are_gone_are_no_new_start(train, tmp_path):
    run = tmp_path / "run"
    assert [json.loads(line)["step"] for line in (run / "saved.jsonl").read_text().splitlines()] == [6]
    (run / "checkpoints" / "step_6").rename(tmp_path / "step_6")
    with pytest.raises(CheckpointError, match=r"are gone \(saved\.jsonl lists 1, the last of step 6\)"):
        train()
    (run / "checkpoints").rmdir()
    with pytest.raises(FolderError, match=r"checkpoints' is gone, and with it what the run had trained"):
        train()
    assert train(resume=False, restart=True).resumed_from_step is None
    assert len((run / "saved.jsonl").read_text().splitlines()) == 1


def test_a_deadline_stops_with_a_checkpoint_and_no_success(train):
    run = train(deadline_seconds=1e-3)
    assert (run.interrupted, run.interrupted_by, run.exit_code) == (True, "deadline", 143)
    assert run.steps == 7
    with pytest.raises(InputError, match="deadline_seconds must be more than 0"):
        train(deadline_seconds=0.0)
    for name in ("changed", "on_nan"):
        with pytest.raises(InputError, match=f"{name} is one of .*, not 'maybe'"):
            train(**{name: "maybe"})


class Numbers(IterableDataset):
    def __iter__(self):
        return iter([(torch.full((6,), number / 40), number % 3) for number in range(40)])


def test_a_stream_in_batches_of_another_size_is_told(tmp_path, tiny):
    """A place in it counts batches: in larger ones samples would be passed over that nobody has seen."""

    def job(size):
        return tiny.make(data=lambda: DataLoader(Numbers(), batch_size=size))

    training.train(job(4), out=tmp_path / "run", max_steps=4)
    with pytest.raises(JobError, match=r"has changed \(batch_size: 4 -> 8\)"):
        training.train(job(8), out=tmp_path / "run", resume=True)
    assert training.train(job(4), out=tmp_path / "run", resume=True).steps == 30
