"""The seconds of a whole training: what tune makes as few as it can."""

import dataclasses

import pytest

from vivace.ledger import Ratio
from vivace.training.options import Options
from vivace.tuning.objective import (
    CHECKPOINT_SECONDS,
    FIRST_LOOK_STEPS,
    WATCHED_SHARE,
    Beside,
    Length,
)

TWICE = Ratio(2.0, 1.6, 2.5)


def test_from_when_on_the_longer_warm_up_pays():
    length = Length(330, 0.010)
    later, sooner = (Ratio(2.0, 1.9, 2.1), 21.0), (Ratio(1.25, 1.2, 1.3), 0.2)
    steps = length.wins_from(later, sooner)
    assert steps == pytest.approx(20 / (0.003 * (1 + WATCHED_SHARE)), rel=1e-3)
    assert length.wins_from(sooner, later) is None
    for count, wins in ((steps - 5, False), (steps + 5, True)):
        longer = Length(count, 0.010)
        assert (longer.seconds(*later) < longer.seconds(*sooner)) is wins
    assert length.pays(*sooner)
    assert not length.pays(*later)
    assert Length(None, 0.010).pays(*later)


def test_from_when_on_a_plan_ends_before_the_reference():
    length = Length(330, 0.010)
    steps = length.wins_from((TWICE, 21.0))
    for count, wins in ((steps - 5, False), (steps + 5, True)):
        assert Length(count, 0.010).pays(TWICE, 21.0) is wins
    assert length.wins_from((Ratio(1.0, 1.0, 1.0), 0.0)) is None


def test_a_training_is_foretold_with_its_interval():
    found = Length(1000, 0.010).foretold(TWICE, 1.0)
    watched = {"plan": 5.05, "plan_low": 4.0 + FIRST_LOOK_STEPS * 0.010, "plan_high": 6.3125}
    assert found == pytest.approx({"reference": 10.0} | {key: 1 + value for key, value in watched.items()})
    assert Length(None, 0.010).foretold(TWICE, 1.0) == {}


def test_of_a_wide_interval_the_estimate_is_foretold_and_the_lower_end_decides():
    length, wide = Length(1000, 0.010), Ratio(2.0, 1.2, 3.3)
    found = length.foretold(wide, 1.0)
    assert found["plan"] == pytest.approx(1 + 5.05)
    assert found["plan_low"] < found["plan"] < found["plan_high"] == pytest.approx(length.seconds(wide, 2.0))


BESIDE = Beside(start=4.0, warmup=0.5, evaluation=2.0, evaluations=10, checkpoint=1.0, end=0.5)


def test_all_of_a_training_counts_with_the_plan_and_without_it():
    length = Length(1000, 0.010, BESIDE)
    assert dataclasses.asdict(length.reference()) == {
        "start": 4.0,
        "warmup": 0.5,
        "steps": 10.0,
        "evaluations": 20.0,
        "checkpoints": 1.0,
        "watching": 0.0,
        "end": 0.5,
    }
    plan = length.under(2.0, 3.0, evaluating=1.5)
    assert (plan.start, plan.warmup, plan.steps, plan.evaluations) == (4.0, 3.0, 5.0, 30.0)
    assert plan.watching == pytest.approx(WATCHED_SHARE * 35.0)
    assert length.foretold(TWICE, 3.0, 1.5)["plan"] == pytest.approx(plan.seconds)
    assert length.reference().seconds == 36.0


def test_a_plan_whose_evaluations_are_slower_may_not_pay():
    length = Length(1000, 0.010, BESIDE)
    assert length.pays(TWICE, 0.5)
    assert not length.pays(TWICE, 0.5, evaluating=1.3)


@pytest.mark.parametrize(("minutes", "saved"), [(1, 1), (19, 2), (61, 7)])
def test_checkpoints_are_saved_as_often_as_train_saves_them(minutes, saved):
    assert Options().checkpoint_every_seconds == CHECKPOINT_SECONDS
    length = Length(60 * minutes, 1.0, Beside(checkpoint=0.5))
    assert length.reference().checkpoints == 0.5 * saved


def test_a_first_pass_over_the_data_is_not_faster_yet():
    length = Length(300, 0.1, epoch_steps=100)
    assert length.first_pass(2.0) == pytest.approx(5.0)
    assert dataclasses.replace(length, epoch_steps=None).first_pass(2.0) == 0.0


def test_a_warm_up_that_is_no_longer_than_the_references_counts_as_that():
    length = Length(100, 0.010, Beside(warmup=2.0))
    assert length.seconds(TWICE, 2.5) == length.seconds(TWICE, 0.0) == pytest.approx(2.55)
    assert length.seconds(TWICE, 4.0) == pytest.approx(3.55)


@pytest.mark.parametrize("speed", [1.02, 1.2, 2.0])
def test_a_short_training_does_not_win_back_what_looking_at_its_first_step_takes(speed):
    ratio = Ratio(speed, speed, speed)
    steps = Length(100, 0.010).wins_from((ratio, 0.0))
    assert steps == pytest.approx(FIRST_LOOK_STEPS / (1 - 1 / speed), abs=2) or speed < 1.05
    for count, wins in ((steps - 5, False), (steps + 5, True)):
        assert Length(count, 0.010).pays(ratio, 0.0) is wins
