"""Nothing that a run needs is left out of the peak that a budget is compared with."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import vivace
from vivace.errors import AnswerIsNo
from vivace.machine import Device
from vivace.measuring import worker
from vivace.measuring.batches import batch_curve
from vivace.plan import Plan

pytestmark = pytest.mark.usefixtures("one_thread")
LABELS = torch.zeros(64, dtype=torch.long)


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))

    def forward(self, x):
        return x + self.body(x)


def mean(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).mean(1), batch[1])


def batch(length):
    return torch.ones(64, length, 8), LABELS


LONG = vivace.Job(
    model=lambda: nn.Sequential(*(Part() for _ in range(6)), nn.Linear(8, 3)),
    data=lambda: [batch(length) for length in (4, 4, 4, 32, 4)],
    loss=mean,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
)


@pytest.fixture
def opened():
    """``(job, plan) -> Worker`` with the job open under the plan, in this process."""
    workers = []

    def start(job, plan=None):
        workers.append(worker.Worker(job, vivace.inspect().to_dict()))
        workers[-1].open(plan or {})
        return workers[-1]

    yield start
    for one in workers:
        one.session.close()


def test_the_longest_sample_counts_though_it_comes_late(opened):
    peak = opened(LONG).observe()["peak_bytes"]
    short = dataclasses.replace(LONG, data=lambda: [batch(4)] * 5)
    assert opened(short).observe()["peak_bytes"] < peak / 4
    budget = int(0.7 * peak)
    chosen = opened(LONG).choose(budget, "EXACT", {})
    assert chosen["kept_bytes"] == pytest.approx(peak, rel=0.01)
    assert opened(LONG, chosen["plan"]).observe()["peak_bytes"] <= budget
    with pytest.raises(AnswerIsNo, match=r"the smallest measured is \d"):
        opened(LONG).choose(peak // 10, "EXACT", {})


def test_validation_counts(opened):
    def metric(model, batches):
        return -sum(float(mean(model, each)) for each in batches)

    job = dataclasses.replace(
        LONG, data=lambda: [batch(4)] * 3, metric=metric, validation=lambda: [batch(4), batch(256)]
    )
    one = opened(job)
    training, whole = one.observe()["peak_bytes"], one.observe(evaluated=True)["peak_bytes"]
    assert whole > 4 * training
    assert one.confirm(one.observe(), evaluated=True)["peak_bytes"] == whole
    assert one.session.model.training


def test_the_optimizers_state_counts(opened):
    adam = dataclasses.replace(LONG, optimizer=lambda model: torch.optim.Adam(model.parameters()))
    weights = sum(p.numel() * 4 for p in LONG.model().parameters())
    more = opened(adam).observe()["peak_bytes"] - opened(LONG).observe()["peak_bytes"]
    assert 2 * weights <= more < 2.2 * weights


def test_a_gpus_process_gets_no_more_than_the_budget(monkeypatch):
    """Whatever compiling or fragmentation would take beyond it fails in the search, and not in the run."""
    shares, here = [], vivace.inspect()
    gpu = Device(kind="cuda", name="a GPU", memory_bytes=2**32)
    machine = dataclasses.replace(here, devices=(gpu, *here.devices)).to_dict()
    monkeypatch.setenv("VIVACE_MEMORY_BYTES", str(2**30))
    monkeypatch.setattr(worker, "training_device", lambda _: torch.device("cuda:0"))
    for name, value in {
        "get_device_properties": lambda _: SimpleNamespace(total_memory=2**32),
        "set_per_process_memory_fraction": lambda share, _: shares.append(share),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    worker.Worker(LONG, machine)
    assert shares == [0.25]


def test_batches_above_the_budget_are_not_tried():
    job = dataclasses.replace(LONG, data=lambda: [batch(8)] * 4)
    machine = vivace.inspect()
    free = batch_curve(job, machine, Plan(), None, 0.2)
    assert [b.samples for b in free.batches] == [16, 32, 64, 128, 256]
    peaks = [b.peak_bytes for b in free.batches]
    assert peaks == sorted(peaks)
    assert all(b.ratio.low <= b.ratio.estimate <= b.ratio.high for b in free.batches)
    assert free.batches[2].ratio.estimate == 1.0
    assert (free.base_samples, free.rule) == (64, "linear")
    tight = batch_curve(job, machine, Plan(), (peaks[2] + peaks[3]) // 2, 0.2)
    assert [b.samples for b in tight.batches if b.ratio] == [16, 32, 64]
    assert tight.batches[4].reason.startswith("it would need about")
    assert tight.batches[4].peak_bytes is None


def test_steps_that_write_into_their_batch_do_not_spoil_the_other_sizes():
    seen = []

    def loss(model, batch):
        x, y = batch
        seen.append(set(y.tolist()))
        y -= 1  # labels from 1 on, as some data has them
        return nn.functional.cross_entropy(model(x), y)

    job = vivace.Job(
        model=lambda: nn.Linear(3, 2),
        data=lambda: [(torch.ones(8, 3), torch.tensor([1, 2] * 4)) for _ in range(4)],
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    curve = batch_curve(job, vivace.inspect(), Plan(), None, 0.1)
    assert [b.samples for b in curve.batches if b.ratio] == [2, 4, 8, 16, 32]
    assert seen == [{1, 2}] * len(seen)


def test_batches_that_cannot_be_joined_say_so():
    job = dataclasses.replace(LONG, optimizer=lambda model: torch.optim.Adam(model.parameters()))
    curve = batch_curve(job, vivace.inspect(), Plan(), None, 0.1)
    assert curve.rule == "square root"
    assert [b.reason for b in curve.batches[:3]] == ["", "", ""]
    assert "batches that cannot be joined" in curve.batches[4].reason


def test_a_size_holds_as_many_samples_as_it_says():
    """Where batches differ, those that are joined hold more or fewer than so many times the first."""
    seen = []

    def loss(model, batch):
        seen.append(len(batch))
        return model(batch).square().mean()

    job = vivace.Job(
        model=lambda: nn.Linear(3, 2),
        data=lambda: [torch.ones(samples, 3) for samples in (8, 5, 5, 7)],
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    curve = batch_curve(job, vivace.inspect(), Plan(), None, 0.1)
    assert {b.samples for b in curve.batches if b.ratio} == {2, 4, 8, 16} == set(seen)
    assert curve.batches[4].reason == "the job's data has too few batches, or batches that cannot be joined"
