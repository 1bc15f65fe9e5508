"""Where a verb is, in a line: how far, and how long it goes on."""

import pytest

from vivace.events import Event, EventKind
from vivace.ledger import Ratio, Trial
from vivace.pages.status import Status, clock


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def time():
    return Clock()


def trial(low, **fields):
    given = {
        "techniques": {},
        "plan_id": "1",
        "machine": "m",
        "job": "j",
        "status": "measured",
        "promise": "exact",
    }
    return Trial(**given, ratio=Ratio(low + 0.1, low, low + 0.2), pairs=((2.0, 1.0),), rounds=1, **fields)


def hear(status, kind, **payload):
    status(Event(EventKind(kind), payload))


def test_a_search_says_how_much_of_its_time_is_gone_and_what_it_tries(time):
    status = Status(time)
    hear(status, "phase", name="checking the job")
    assert status.line == "0:00, checking the job"
    hear(status, "phase", name="searching", budget_seconds=600.0)
    for low in (0.8, 1.28, 1.1):
        hear(status, "trial_begin", plan="bf16_autocast")
        hear(status, "trial_end", trial=trial(low))
    hear(status, "trial_end", trial=trial(1.5, role="baseline_tf32"))
    hear(status, "trial_begin", plan="compile")
    time.now += 192.0
    assert status.line == "3:12 of 10:00, 3 tried, best 1.38x, trying compile"


def test_a_training_says_how_much_is_left(time):
    status = Status(time)
    hear(status, "begin", step=0, epochs=90, steps=450_450, steps_per_epoch=5005)
    hear(status, "step", step=1, epoch=1, loss=6.9, samples_per_second=900.0)
    assert status.line == "epoch 1/90, step 1/5,005, loss 6.9, 900 samples/s"
    assert status.seconds_left is None  # nobody knows yet
    time.now += 10_422 * 0.25
    hear(status, "step", step=10_422, epoch=3, loss=2.34567, samples_per_second=1204.4)
    assert status.line == "epoch 3/90, step 412/5,005, loss 2.346, 1,204 samples/s, ends in 30 h 34 min"


def test_at_its_end_nothing_is_left(time):
    status = Status(time)
    hear(status, "begin", step=0, epochs=1, steps=9, steps_per_epoch=9)
    for step in (1, 9):
        time.now += 60.0
        hear(status, "step", step=step, epoch=1, loss=1.0, samples_per_second=5.0)
    hear(status, "checkpoint", step=9, path="runs/train", seconds=1.0)
    assert status.line == "epoch 1/1, step 9/9, loss 1, 5.00 samples/s, checkpoint of step 9"
    hear(status, "stop")
    assert status.line == "epoch 1/1, step 9/9, loss 1, 5.00 samples/s"


def test_a_training_that_becomes_faster_ends_sooner(time):
    status = Status(time)
    hear(status, "begin", step=0, epochs=1, steps=1000, steps_per_epoch=1000)
    found = []
    for step in range(10, 500, 10):
        time.now += 10.0 if step < 200 else 1.0
        hear(status, "step", step=step, epoch=1, loss=1.0, samples_per_second=1.0)
        found += [status.seconds_left / (1000 - step)] if status.seconds_left is not None else []
    assert found[17] == pytest.approx(1.0)
    assert found[-1] == pytest.approx(0.1, rel=0.05)


def test_a_training_of_unknown_length_says_what_it_knows(time):
    status = Status(time)
    hear(status, "begin", step=0, epochs=1, steps=None, steps_per_epoch=None)
    time.now += 60.0
    hear(status, "step", step=40, epoch=1, loss=None, samples_per_second=12.3)
    assert status.line == "epoch 1/1, step 40, 12 samples/s"


@pytest.mark.parametrize(
    ("seconds", "told"), [(0, "0:00"), (59.9, "0:59"), (600, "10:00"), (3605, "1:00:05")]
)
def test_clock(seconds, told):
    assert clock(seconds) == told
