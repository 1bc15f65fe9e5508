"""How long the parts of a search take, and what a budget's words mean."""

import dataclasses
import textwrap

import pytest

from vivace.inspection import store
from vivace.ledger import Code, Ratio, Trial
from vivace.measuring.budget import BUDGETS
from vivace.measuring.pace import COMPILING_SECONDS, compiling_pace, compiling_seconds, learn_pace
from vivace.plan import Plan
from vivace.technique.registry import find
from vivace.tuning.objective import Beside, Length
from vivace.tuning.times import (
    ROUNDS,
    Times,
    auto_budget,
    beforehand,
    least_seconds,
    too_short,
)
from vivace.verifying.verdict import Verdict

FUSED = Plan([find("fused_optimizer")()])
COMPILED = Plan([find("compile")()])
COMPANY = Plan([find("compile")(), find("fused_optimizer")()])


def trial(plan, seconds, *, warmup=0.0, blocks=4, **more):
    known = {"ratio": Ratio(1.2, 1.1, 1.3), "pairs": ((0.01, 0.01),) * blocks}
    named = {"seconds": seconds, "warmup_seconds": warmup, **known, **more}
    return Trial(plan.to_dict(), plan.id, "m", "j", "measured", **named)


def test_what_a_trial_takes_is_learned_from_the_trials():
    times = Times(120.0, 0.01, 3.0)
    assert times.start(FUSED) == 3.0  # as the reference took
    assert times.trial(FUSED) == 3.0 + 6.0
    times.learn(trial(FUSED, 7.4))  # four pairs of blocks of 0.3 s
    assert times.opening == pytest.approx(5.0)
    assert times.trial(FUSED) == pytest.approx(7.4)
    times.learn(dataclasses.replace(trial(FUSED, 90.0), status="failed", reason="it hung"))
    assert times.trial(FUSED) == pytest.approx(7.4)


def test_a_warm_up_is_known_from_what_compiles_alike():
    times = Times(120.0, 0.01, 3.0)
    assert times.warmup(COMPILED) == COMPILING_SECONDS
    assert times.warmup(FUSED) == 0.0
    times.learn(trial(COMPILED, 40.0, warmup=33.0))
    assert times.warmup(COMPANY) == 33.0
    times.learn(trial(COMPANY, 12.0, warmup=5.0))
    assert times.warmup(COMPANY) == 5.0


@pytest.mark.parametrize(("first", "again"), [(1.0, 1.0), (20.0, 3.0), (110.0, 7.5)])
def test_what_was_compiled_once_is_not_compiled_again_where_it_is_confirmed(first, again):
    times = Times(600.0, 0.01, 3.0)
    times.learn(trial(COMPANY, 120.0, warmup=first))
    assert times.settling(COMPANY) - times.settling(FUSED) == pytest.approx(ROUNDS * again)


@pytest.mark.parametrize(
    ("operators", "seconds"), [(8, 6.3), (17, 20.4), (6, 12.1), (14, 20.1), (25, 25.5), (157, 110.0)]
)
def test_compiling_takes_about_what_it_took_on_two_cores(operators, seconds):
    """The cold warm-ups of six of the benchmarks' jobs."""
    assert compiling_seconds(operators, 2) == pytest.approx(seconds, abs=6.0)
    assert compiling_seconds(operators, 1) > compiling_seconds(operators, 16)


def test_how_fast_this_machine_compiles_is_learned_from_the_tunings_of_other_jobs(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("vivace.measuring.pace.cache_folder", store.cache_folder)
    assert compiling_pace("here") == 1.0
    cold, warm = trial(COMPILED, 40.0, warmup=33.0), trial(COMPANY, 12.0, warmup=3.0)
    for _ in range(2):
        learn_pace("here", 100.0, [trial(FUSED, 7.0), cold, warm])
    assert compiling_pace("here") == pytest.approx(0.33)
    assert compiling_pace("elsewhere") == 1.0
    for _ in range(20):  # a machine that compiles more slowly from now on
        learn_pace("here", 10.0, [cold])
    assert compiling_pace("here") == pytest.approx(3.3)


def test_a_tuning_in_which_compiling_was_not_seen_teaches_no_pace(monkeypatch, tmp_path):
    monkeypatch.setattr("vivace.measuring.pace.cache_folder", lambda: tmp_path)
    failed = {"status": "failed", "reason": "it ended", "warmup_seconds": None, "ratio": None, "pairs": ()}
    cold = trial(COMPILED, 40.0, warmup=33.0)
    crashed = dataclasses.replace(cold, **failed)
    learn_pace("here", 10.0, [trial(FUSED, 7.0)])
    learn_pace("here", 10.0, [crashed, cold])  # part of it had been compiled
    learn_pace("here", 10.0, [dataclasses.replace(cold, foreign_share=0.7)])
    assert compiling_pace("here") == 1.0
    assert not list(tmp_path.iterdir())
    stopped = dataclasses.replace(crashed, seconds=46.0, code=Code.TIMED_OUT)
    learn_pace("here", 20.0, [dataclasses.replace(stopped, status="refused", code=Code.NONE), stopped])
    assert compiling_pace("here") == pytest.approx((1 + 2.3) / 2), "at least so long; and one is not enough"
    (tmp_path / "compiling" / "here.jsonl").unlink()
    (tmp_path / "compiling" / "here.jsonl").symlink_to(tmp_path / "elsewhere")
    learn_pace("here", 20.0, [cold])
    assert compiling_pace("here") == 1.0, "a cache that cannot be used costs nothing but the forecast"


def test_what_compiles_gets_its_time_and_no_more():
    times = Times(600.0, 0.01, 5.0, compiling_seconds(157, 2))
    assert times.start(COMPILED) == pytest.approx(5.0 + 115.9)
    assert times.limit(COMPILED, 600.0) == 300.0
    assert times.limit(COMPILED, 300.0) == pytest.approx(2 * times.start(COMPILED))
    assert times.limit(COMPILED, 150.0) == 150.0
    assert times.limit(FUSED, 300.0) == 150.0


def test_a_confirmation_and_a_verification_are_learned():
    times = Times(600.0, 0.01, 3.0)
    guessed = times.settling(FUSED)
    times.learn(Verdict(True, "rounding", 0.0, 0.0, 3, 3, "", seconds=30.0))
    times.learn(trial(FUSED, 60.0, role="confirmation", rounds=3))
    assert (times.verification(), times.confirmation()) == (30.0, 60.0)
    assert times.settling(FUSED) == 90.0 > guessed
    times.learn(Verdict(True, "semantics", 0.0, 0.0, 3, 3, "", seconds=400.0, metric={"n": 3}))
    assert times.verification() == 30.0  # whole trainings are no measure of it


def test_what_is_kept_for_settling_is_not_most_of_a_short_budget():
    assert Times(60.0, 1.0, 10.0).settling(FUSED) == 27.0


def test_auto_is_a_tenth_of_the_trainings():
    assert auto_budget(Length(None, 0.1)) == BUDGETS["balanced"]
    assert auto_budget(Length(10_000, 0.1)) == pytest.approx(100.0)
    assert auto_budget(Length(10_000, 0.1, runs=5)) == pytest.approx(500.0)
    assert auto_budget(Length(10_000_000, 0.1)) == BUDGETS["max"]
    whole = Length(10_000, 0.1, Beside(start=8.0, evaluation=20.0, evaluations=10, end=2.0))
    assert auto_budget(whole) == pytest.approx(121.0)


def test_the_least_that_a_tuning_takes_grows_with_the_step():
    assert least_seconds(0.0) == 60.0
    assert least_seconds(1.0) == pytest.approx(188.0)  # a verification runs as long as 128 steps at least
    length = Length(1_000, 1.0)
    assert auto_budget(length) == pytest.approx(100.0)
    assert "(1,000 steps of 1 s); tuning, at least 3 min 08 s. Give" in too_short(length)
    assert "--budget 4m" in too_short(length)


def test_what_is_said_before_a_search():
    unknown = beforehand(Length(None, 0.1), 600.0, given=False)
    assert unknown.startswith("How long this training is cannot be told from its data: give --steps N.")
    assert "sought for 10 min" in unknown
    short = Length(330, 0.1, Beside(start=7.0))
    assert beforehand(short, 120.0, given=True) == (
        "The training takes about 40 s, the budget is 2 min: tuning may take longer than it can save; give "
        "--runs N if you train it more often, or --budget auto"
    )
    often = dataclasses.replace(short, runs=2)
    assert beforehand(often, 120.0, given=True).startswith("2 trainings take about 1 min 20 s, the budget")
    assert beforehand(dataclasses.replace(short, runs=3), 120.0, given=True) == ""
    assert beforehand(short, 120.0, given=False) == ""  # with a limit of memory it is searched in any case


def test_a_short_training_is_told_so():
    assert too_short(Length(330, 0.02, runs=3)) == (
        "This training takes 6.6 s (330 steps of 20.0 ms), 3 times; tuning, at least 1 min 03 s. Give --runs "
        "N for more runs, --budget 2m, or train with --tune"
    )
    with_start = Length(330, 0.02, Beside(start=4.2))
    assert too_short(with_start).startswith(
        "This training takes 11 s (4.2 s and 330 steps of 20.0 ms); tuning"
    )
    lengths = (Length(240, 0.101, with_start.beside), Length(99_999, 0.00312), Length(330, 0.02, runs=3))
    for length in lengths:
        assert len(textwrap.wrap(too_short(length) + ".", 80)) <= 2  # so it is not cut
